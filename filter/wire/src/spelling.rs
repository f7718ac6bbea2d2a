//! The known name that somebody probably meant.

/// Longest name that is compared, in bytes: longer ones are no slip of the finger.
const MAX: usize = 64;
/// Most letters to insert, leave out, replace or swap with their neighbour.
const SLIPS: usize = 2;

/// The name of `known` that `name` differs from least, by at most two letters and regardless of
/// case; of equally close ones the first.
pub fn closest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > MAX {
        return None;
    }
    let name = name.to_lowercase();
    known
        .into_iter()
        .map(|known| (strsim::osa_distance(&name, &known.to_lowercase()), known))
        .filter(|(distance, _)| *distance <= SLIPS)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_name_within_two_slips_is_meant() {
        let known = ["port", "metric-port", "prefill", "prefer"];
        for (name, meant) in [
            ("prot", Some("port")),
            ("Port", Some("port")),
            ("metric_port", Some("metric-port")),
            ("prefil", Some("prefill")),
            ("preferr", Some("prefer")),
            ("prefi", Some("prefill")),
            ("partial", None),
            ("", None),
        ] {
            assert_eq!(closest(name, known), meant, "{name}");
        }
        assert_eq!(closest(&"port".repeat(17), known), None);
    }
}
