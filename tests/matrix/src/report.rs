//! What a run of the table saw.

use std::fmt::Write as _;

use crate::Cell;

/// What was seen of one cell.
#[derive(Clone, Debug)]
pub struct Line {
    /// What the client got, in a word or two.
    pub seen: String,
    /// How long that took, in ms.
    pub ms: u64,
    /// What was left of it in the engines and in the ledger, and for how long; empty for nothing.
    pub left: String,
    /// What was not as expected; empty when all was.
    pub wrong: Vec<String>,
}

/// The lines of a run, in the order of the table.
#[derive(Debug, Default)]
pub struct Report {
    listed: Vec<Listed>,
}

#[derive(Debug)]
struct Listed {
    id: String,
    expected: String,
    why: &'static str,
    line: Option<Line>,
}

// === impl Report ===

impl Report {
    /// A report that lists these cells, none of them run.
    pub fn of<'c>(cells: impl IntoIterator<Item = &'c Cell>) -> Self {
        let listed = cells.into_iter().map(|cell| Listed {
            id: cell.id(),
            expected: cell.expect.client.describe(),
            why: cell.expect.why,
            line: None,
        });
        Self {
            listed: listed.collect(),
        }
    }

    /// Notes what was seen of a cell; of one that is not listed, as a failure.
    pub fn note(&mut self, id: &str, mut line: Line) {
        if let Some(listed) = self.listed.iter_mut().find(|listed| listed.id == id) {
            listed.line = Some(line);
            return;
        }
        line.wrong.push("the cell is not listed".to_owned());
        self.listed.push(Listed {
            id: id.to_owned(),
            expected: String::new(),
            why: "",
            line: Some(line),
        });
    }

    /// The cells that failed or were not run.
    #[must_use]
    pub fn failed(&self) -> Vec<&str> {
        self.listed
            .iter()
            .filter(|listed| {
                listed
                    .line
                    .as_ref()
                    .is_none_or(|line| !line.wrong.is_empty())
            })
            .map(|listed| listed.id.as_str())
            .collect()
    }

    /// The table, a line per cell and what is wrong below it, and a summary.
    #[must_use]
    pub fn table(&self) -> String {
        let width = |text: fn(&Listed) -> usize| self.listed.iter().map(text).max().unwrap_or(0);
        let (ids, expectations) = (
            width(|cell| cell.id.len()),
            width(|cell| cell.expected.len()),
        );
        let mut text = String::new();
        // Writing into a String cannot fail.
        let _ = writeln!(
            text,
            "{:ids$}  {:expectations$}  {:expectations$}  {:>6}  {:20}  verdict",
            "cell", "expected", "seen", "ms", "left"
        );
        for cell in &self.listed {
            let (seen, ms, left) = match &cell.line {
                Some(line) => (line.seen.as_str(), line.ms.to_string(), line.left.as_str()),
                None => ("not run", String::new(), ""),
            };
            let left = if left.is_empty() { "-" } else { left };
            let wrong = cell.line.as_ref().map_or(&[][..], |line| &line.wrong);
            let verdict = match &cell.line {
                Some(line) if line.wrong.is_empty() => "ok",
                _ => "FAILED",
            };
            let (id, expected) = (&cell.id, &cell.expected);
            let _ = writeln!(
                text,
                "{id:ids$}  {expected:expectations$}  {seen:expectations$}  {ms:>6}  {left:20}  {verdict}"
            );
            for wrong in wrong {
                let _ = writeln!(text, "    {wrong}");
            }
            if !wrong.is_empty() {
                let _ = writeln!(text, "    promised: {}", cell.why);
            }
        }
        let (all, failed) = (self.listed.len(), self.failed().len());
        let _ = writeln!(text, "{all} cells, {} ok, {failed} failed", all - failed);
        text
    }

    /// Prints the table.
    ///
    /// # Errors
    /// Names the cells that failed or were not run.
    #[allow(clippy::print_stdout, reason = "the table is what a run shows")]
    pub fn conclude(&self) -> Result<(), String> {
        println!("{}", self.table());
        let failed = self.failed();
        if failed.is_empty() {
            Ok(())
        } else {
            Err(format!(
                "{} cells failed: {}",
                failed.len(),
                failed.join(", ")
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(wrong: &[&str]) -> Line {
        Line {
            seen: "200".to_owned(),
            ms: 12,
            left: String::new(),
            wrong: wrong.iter().map(|wrong| (*wrong).to_owned()).collect(),
        }
    }

    #[test]
    fn a_cell_that_failed_or_was_not_run_or_is_not_listed_fails_the_run() {
        let cells = crate::cells();
        let [first, second, third] = &cells[..3] else {
            panic!("a table of less than three cells");
        };
        let mut report = Report::of([first, second, third]);
        report.note(&first.id(), line(&[]));
        report.note(&second.id(), line(&["two endings"]));
        report.note("nowhere", line(&[]));
        let failed = [second.id(), third.id(), "nowhere".to_owned()];
        assert_eq!(report.failed(), failed);
        let table = report.table();
        assert!(table.contains("two endings") && table.contains("4 cells, 1 ok, 3 failed"));
        assert!(report.conclude().unwrap_err().starts_with("3 cells failed"));
    }

    #[test]
    fn a_run_in_which_all_held_passes() {
        let cells = crate::cells();
        let mut report = Report::of(cells.iter().take(1));
        report.note(&cells[0].id(), line(&[]));
        assert_eq!(report.conclude(), Ok(()));
    }
}
