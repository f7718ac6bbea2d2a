//! Median, least and greatest of a few repeats.

use serde::Serialize;

/// Summary of repeats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// Middle value; of an even number, the mean of the two in the middle.
    pub(crate) median: f64,
    /// Least.
    pub(crate) min: f64,
    /// Greatest.
    pub(crate) max: f64,
}

// === impl Spread ===

impl Spread {
    /// Of no values: zeros.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let at = |index: usize| sorted.get(index).copied();
        let upper = at(sorted.len() / 2).unwrap_or_default();
        let lower = at(sorted.len().saturating_sub(1) / 2).unwrap_or_default();
        Self {
            median: (lower + upper) / 2.0,
            min: sorted.first().copied().unwrap_or_default(),
            max: sorted.last().copied().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_counts() {
        let odd = Spread::of([9.0, 1.0, 2.0]);
        assert_eq!((odd.median, odd.min, odd.max), (2.0, 1.0, 9.0));
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 8.0]).median, 3.0);
        assert_eq!(Spread::of([]), Spread::default());
    }
}
