//! Prometheus text format, as far as it is needed: name, value and, on request, a label of each
//! sample.
//!
//! Labels are skipped, not parsed: most series of one name are summed or averaged over all of
//! them, and who needs a label looks it up with [`label`]. Written here because the maintained parsers build a model of the whole page
//! with every label as a string, for a few numbers out of some thousand lines, five times a
//! second per pod. Lines that do not fit the format are passed over, and so are values that
//! are not finite: a missing number is absent, never zero.

/// One sample of a page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample<'a> {
    /// Name of the series.
    pub name: &'a str,
    /// What stands between the braces; empty without any.
    pub labels: &'a str,
    /// Its value, always finite.
    pub value: f64,
}

/// Name and value of every readable sample of a page.
pub fn samples(page: &str) -> impl Iterator<Item = (&str, f64)> {
    series(page).map(|sample| (sample.name, sample.value))
}

/// Every readable sample of a page, labels included.
pub fn series(page: &str) -> impl Iterator<Item = Sample<'_>> {
    page.lines().filter_map(sample)
}

/// The value of a label as it is written (escapes stay), `None` when there is no such label.
pub fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let mut rest = labels;
    while let Some((key, quoted)) = rest.split_once("=\"") {
        let end = end_of_value(quoted)?;
        let (value, after) = quoted.split_at(end);
        if key.trim_matches([',', ' ']) == name {
            return Some(value);
        }
        rest = after.get(1..)?;
    }
    None
}

/// Position of the quote that ends a label value.
fn end_of_value(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let line = line.trim_start();
    if line.starts_with('#') {
        return None;
    }
    let end = line.find(|c: char| c == '{' || c.is_ascii_whitespace())?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(labelled) => split_labels(labelled)?,
        None => ("", rest),
    };
    // A time stamp or an exemplar may follow the value.
    let value: f64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
    (!name.is_empty() && value.is_finite()).then_some(Sample {
        name,
        labels,
        value,
    })
}

/// Labels and what follows the closing brace; label values may hold braces, and quotes after a
/// backslash.
fn split_labels(text: &str) -> Option<(&str, &str)> {
    let mut quoted = false;
    let mut escaped = false;
    for (position, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some((text.get(..position)?, text.get(position + 1..)?)),
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
    fn a_label_is_found_by_its_whole_name() {
        let labels = r#"model_name="a,dp_rank=\"9\"",tp_rank="1", dp_rank="2",priority="""#;
        assert_eq!(label(labels, "dp_rank"), Some("2"));
        assert_eq!(label(labels, "tp_rank"), Some("1"));
        assert_eq!(label(labels, "priority"), Some(""));
        assert_eq!(label(labels, "rank"), None);
        assert_eq!(label(labels, "model_name"), Some(r#"a,dp_rank=\"9\""#));
        assert_eq!(label("", "dp_rank"), None);
    }

    #[test]
    fn what_is_no_sample_or_no_number_is_passed_over() {
        let page = "\n \na\na x\na{b=\"c\" 1\n{x=\"y\"} 1\na NaN\na +Inf\na{b=\"\\\"} 1\n<html>\n";
        assert_eq!(samples(page).collect::<Vec<_>>(), [] as [(&str, f64); 0]);
    }
}
