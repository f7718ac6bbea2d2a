//! Prometheus text format, as far as it is needed: name and value of each sample.
//!
//! Labels are skipped, not parsed: the engines' series of one name are summed or averaged over
//! all of them. Written here because the maintained parsers build a model of the whole page
//! with every label as a string, for a few numbers out of some thousand lines, five times a
//! second per pod. Lines that do not fit the format are passed over, and so are values that
//! are not finite: a missing number is absent, never zero.

/// Name and value of every readable sample of a page.
pub fn samples(page: &str) -> impl Iterator<Item = (&str, f64)> {
    page.lines().filter_map(sample)
}

fn sample(line: &str) -> Option<(&str, f64)> {
    let line = line.trim_start();
    if line.starts_with('#') {
        return None;
    }
    let end = line.find(|c: char| c == '{' || c.is_ascii_whitespace())?;
    let (name, rest) = line.split_at(end);
    let rest = match rest.strip_prefix('{') {
        Some(labels) => after_labels(labels)?,
        None => rest,
    };
    // A time stamp or an exemplar may follow the value.
    let value: f64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
    (!name.is_empty() && value.is_finite()).then_some((name, value))
}

/// What follows the closing brace; label values may hold braces, and quotes after a backslash.
fn after_labels(text: &str) -> Option<&str> {
    let mut quoted = false;
    let mut escaped = false;
    for (position, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return text.get(position + 1..),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_are_read_whatever_the_labels_hold() {
        let page = concat!(
            "# HELP a b\n# TYPE a gauge\n",
            "a 1\n",
            "a{engine=\"0\",model=\"m}\\\"x{\"} 2.5e+03 1700000000\n",
            "b_total{le=\"+Inf\"}\t7 # {trace=\"x\"} 0.5\r\n",
            "  c{} -0.25\n",
        );
        let read: Vec<_> = samples(page).collect();
        assert_eq!(
            read,
            [("a", 1.0), ("a", 2500.0), ("b_total", 7.0), ("c", -0.25)]
        );
    }

    #[test]
    fn what_is_no_sample_or_no_number_is_passed_over() {
        let page = "\n \na\na x\na{b=\"c\" 1\n{x=\"y\"} 1\na NaN\na +Inf\na{b=\"\\\"} 1\n<html>\n";
        assert_eq!(samples(page).collect::<Vec<_>>(), [] as [(&str, f64); 0]);
    }
}
