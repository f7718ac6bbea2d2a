//! Divides the prompt lengths that several rolesets take into one band per roleset.
//!
//! Lengths are cut into *segments* by where the rolesets' ranges begin and end; within a segment
//! the same rolesets take every length. Each roleset has one share of the traffic, by its part of
//! the prefill pods, and is charged first what only it can serve. Then every segment that several
//! rolesets take, the heaviest first, is divided among those that still need traffic, in
//! proportion to what each needs, and each band is debited: a roleset in several segments draws
//! on one share.
//!
//! Cuts lie between bins, at the border nearest to the quantile of the traffic. Bins are not
//! divided: how lengths lie inside one is not known, and often they are all equal. Where both
//! borders of a bin are too far off, its lengths get no band and are left to scoring, so that no
//! band gets much more than was meant for it, whatever the lengths are.
//!
//! The lowest lengths go to the roleset that takes the shortest ones, and so on: an order that
//! does not change with traffic, so bands move and never swap.

use super::groups::Group;
use super::histogram::{Histogram, Slice};
use pd_wire::knobs::BucketServeMode;

/// Most bands of a plan; a segment that needs more stays whole.
pub const MAX_BANDS: usize = 64;
/// A segment with less of all traffic stays whole.
const MIN_SEGMENT: f64 = 0.05;
/// A roleset that lacks less of all traffic needs none.
const MIN_NEED: f64 = 0.01;
/// Most that a cut may miss its quantile by, as a part of the smaller of the two bands' traffic.
const CUT_ERROR: f64 = 0.125;

/// Prompt lengths, and the roleset that is preferred for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band {
    /// Shortest length, in tokens.
    pub low: u64,
    /// Longest length, in tokens; `u64::MAX` = no limit.
    pub high: u64,
    /// The roleset, by its position among the groups.
    pub roleset: u16,
}

/// Bands in the order of lengths; they do not overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    bands: Vec<Band>,
}

/// Lengths that the same rolesets take, with their traffic.
#[derive(Debug)]
struct Segment {
    low: u64,
    high: u64,
    /// By position, in the order of bands.
    rolesets: Vec<u16>,
    slices: Vec<Slice>,
    weight: f64,
}

/// The end of one band and the beginning of the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Last length below; `None` when there is none.
    below: Option<u64>,
    /// First length above; `None` when there is none.
    above: Option<u64>,
}

// === impl Plan ===

impl Plan {
    /// The bands for traffic, in the unit of `mode`, over rolesets. No traffic, no bands.
    #[must_use]
    pub fn of(traffic: &Histogram, groups: &[Group], mode: BucketServeMode) -> Self {
        let segments = segments(traffic, groups, mode);
        let total: f64 = segments.iter().map(|segment| segment.weight).sum();
        let mut needs = needs(&segments, groups, total);
        let mut shared: Vec<&Segment> = segments
            .iter()
            .filter(|segment| segment.rolesets.len() > 1 && segment.weight >= MIN_SEGMENT * total)
            .collect();
        // Stable: of equal ones the first.
        shared.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        let mut bands = Vec::new();
        for segment in shared {
            let need = |roleset: u16| needs.get(usize::from(roleset)).copied().unwrap_or(0.0);
            let active: Vec<(u16, f64)> = segment
                .rolesets
                .iter()
                .map(|roleset| (*roleset, need(*roleset)))
                .filter(|(_, need)| *need >= MIN_NEED * total)
                .collect();
            if active.len().saturating_add(bands.len()) > MAX_BANDS {
                continue;
            }
            for band in segment.divide(&active) {
                if let Some(need) = needs.get_mut(usize::from(band.roleset)) {
                    *need = (*need - segment.weight_in(&band)).max(0.0);
                }
                bands.push(band);
            }
        }
        bands.sort_unstable_by_key(|band| band.low);
        Self { bands }
    }

    /// The roleset preferred for a length; `None` when no band holds it.
    #[must_use]
    pub fn roleset_for(&self, tokens: u64) -> Option<u16> {
        let after = self.bands.partition_point(|band| band.low <= tokens);
        let band = self.bands.get(after.checked_sub(1)?)?;
        (tokens <= band.high).then_some(band.roleset)
    }

    /// All bands.
    #[must_use]
    pub fn bands(&self) -> &[Band] {
        &self.bands
    }
}

/// The segments that have traffic.
fn segments(traffic: &Histogram, groups: &[Group], mode: BucketServeMode) -> Vec<Segment> {
    let ranges = groups.iter().flat_map(|group| &group.ranges);
    let mut starts: Vec<u64> = ranges
        .flat_map(|(low, high)| [Some(*low), high.checked_add(1)])
        .flatten()
        .chain([0])
        .collect();
    starts.sort_unstable();
    starts.dedup();
    let mut out: Vec<Segment> = Vec::new();
    for slice in traffic.slices(mode) {
        let after = starts.partition_point(|start| *start <= slice.mean);
        let low = after.checked_sub(1).and_then(|at| starts.get(at));
        let low = low.copied().unwrap_or(0);
        if let Some(segment) = out.last_mut().filter(|segment| segment.low == low) {
            segment.take(slice);
            continue;
        }
        let rolesets = covering(groups, low);
        if rolesets.is_empty() {
            continue;
        }
        let mut segment = Segment {
            low,
            high: starts
                .get(after)
                .map_or(u64::MAX, |next| next.saturating_sub(1)),
            rolesets,
            slices: Vec::new(),
            weight: 0.0,
        };
        segment.take(slice);
        out.push(segment);
    }
    out
}

/// The rolesets that take a length, in the order of bands.
fn covering(groups: &[Group], tokens: u64) -> Vec<u16> {
    let mut found: Vec<(Option<(u64, u64)>, u16)> = (0_u16..)
        .zip(groups)
        .filter(|(_, group)| group.takes(tokens))
        .map(|(roleset, group)| (group.reach(), roleset))
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, roleset)| roleset).collect()
}

/// What each roleset's share leaves after the traffic that only it takes.
fn needs(segments: &[Segment], groups: &[Group], total: f64) -> Vec<f64> {
    let replicas = |group: &Group| f64::from(group.replicas.max(1));
    let all: f64 = groups.iter().map(replicas).sum();
    let mut needs: Vec<f64> = groups
        .iter()
        .map(|group| total * replicas(group) / all)
        .collect();
    for segment in segments {
        if let [only] = *segment.rolesets
            && let Some(need) = needs.get_mut(usize::from(only))
        {
            *need -= segment.weight;
        }
    }
    needs
}

// === impl Segment ===

impl Segment {
    fn take(&mut self, slice: Slice) {
        self.weight += slice.weight;
        self.slices.push(slice);
    }

    /// One band per roleset, in proportion to what each needs; empty ones are left out.
    fn divide(&self, active: &[(u16, f64)]) -> Vec<Band> {
        let all: f64 = active.iter().map(|(_, need)| need).sum();
        let part = |need: f64| self.weight * need / all;
        let mut bands = Vec::with_capacity(active.len());
        let mut low = Some(self.low);
        let mut reached = 0.0;
        let followers = active.iter().skip(1).map(Some).chain([None]);
        for (&(roleset, need), next) in active.iter().zip(followers) {
            reached += part(need);
            let cut = match next {
                Some((_, other)) => self.cut(reached, CUT_ERROR * part(need.min(*other))),
                None => Cut {
                    below: Some(self.high),
                    above: None,
                },
            };
            if let (Some(low), Some(high)) = (low, cut.below)
                && low <= high
            {
                bands.push(Band { low, high, roleset });
            }
            low = cut.above;
        }
        bands
    }

    /// Cuts where `quantile` of the traffic lies below, to within `error`; otherwise leaves out
    /// the bin that the quantile lies in.
    fn cut(&self, quantile: f64, error: f64) -> Cut {
        let mut before = 0.0;
        for slice in &self.slices {
            let after = before + slice.weight;
            if after < quantile {
                before = after;
                continue;
            }
            let (under, over) = (quantile - before, after - quantile);
            // The first and the last bin may reach beyond the segment.
            let lower = slice.first.max(self.low);
            let upper = slice.last.min(self.high);
            let (ends_before, starts_after) = (
                lower.checked_sub(1).filter(|_| lower > self.low),
                upper.checked_add(1).filter(|_| upper < self.high),
            );
            return if under.min(over) > error {
                Cut {
                    below: ends_before,
                    above: starts_after,
                }
            } else if under <= over {
                Cut {
                    below: ends_before,
                    above: Some(lower),
                }
            } else {
                Cut {
                    below: Some(upper),
                    above: starts_after,
                }
            };
        }
        // Sums round: all traffic lies below.
        Cut {
            below: Some(self.high),
            above: None,
        }
    }

    /// Traffic of a band.
    fn weight_in(&self, band: &Band) -> f64 {
        let inside = |slice: &&Slice| (band.low..=band.high).contains(&slice.mean);
        self.slices.iter().filter(inside).map(|s| s.weight).sum()
    }
}

#[cfg(test)]
mod tests;
