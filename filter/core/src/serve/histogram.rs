//! The prompt lengths of one model's traffic: requests and prompt tokens per bin of lengths,
//! halved every 30 s.
//!
//! Bins are fixed and eight to the octave, so a bin's lengths differ by 9 % at most and the size
//! never changes. Time is an argument; decay multiplies all bins alike, so it never moves a
//! quantile, and a picture may be read long after it was written.

use crate::FORMAT;
use crate::ledger::record::u64_at;
use pd_wire::knobs::BucketServeMode;

/// Number of bins. The last one takes everything longer than all others.
pub const BINS: usize = 168;
/// Time in which traffic comes to count half, in ms.
pub const HALF_LIFE_MS: u64 = 30_000;

/// Prompts beyond this length, in tokens, count as this long: where a 169th bin would start.
const LONGEST: u64 = 1 << 21;
/// Decay is worked out for steps of at least this much, in ms: exact to 2.3 % in between, and
/// no power of two per request.
const STEP_MS: u64 = 1000;
/// Fewer requests than this count as none: one request, ten minutes ago.
const FORGOTTEN: f64 = 1.0 / (1_u32 << 20) as f64;
/// No sum of this much traffic is true; keeps all sums finite.
const ABSURD: f64 = 1e30;

/// Shortest length of each bin: the first whole number that is not below `2^(bin / 8)`; the first
/// bin takes 0 too.
const FIRST: [u64; BINS] = first_lengths();

const HEAD: usize = 17;
const ENTRY: usize = 16;

/// Traffic of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    /// When the numbers were true, in ms of the shared monotonic clock.
    at_ms: u64,
    bins: Vec<Bin>,
}

/// Traffic of one bin.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Bin {
    requests: f64,
    tokens: f64,
}

/// Traffic of one bin in the unit of a mode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slice {
    /// Shortest length of the bin, in tokens.
    pub first: u64,
    /// Longest length of the bin, in tokens.
    pub last: u64,
    /// Mean length of the bin's traffic, in tokens.
    pub mean: u64,
    /// Requests or prompt tokens.
    pub weight: f64,
}

// === impl Histogram ===

impl Histogram {
    /// No traffic.
    #[must_use]
    pub fn new(now_ms: u64) -> Self {
        Self {
            at_ms: now_ms,
            bins: vec![Bin::default(); BINS],
        }
    }

    /// Adds a request. One without a prompt says nothing about lengths.
    pub fn record(&mut self, tokens: u64, now_ms: u64) {
        if tokens == 0 {
            return;
        }
        if now_ms.saturating_sub(self.at_ms) >= STEP_MS {
            self.settle(now_ms);
        }
        if let Some(bin) = self.bins.get_mut(bin_of(tokens)) {
            bin.requests += 1.0;
            bin.tokens += tokens.min(LONGEST) as f64;
        }
    }

    /// Lets traffic decay up to a time; an earlier one than before changes nothing.
    pub fn settle(&mut self, now_ms: u64) {
        let Some(passed_ms) = now_ms.checked_sub(self.at_ms).filter(|ms| *ms > 0) else {
            return;
        };
        self.at_ms = now_ms;
        let left = decay(passed_ms);
        for bin in &mut self.bins {
            bin.requests *= left;
            bin.tokens *= left;
            if bin.requests < FORGOTTEN {
                *bin = Bin::default();
            }
        }
    }

    /// Adds other traffic, both decayed up to the later of their times.
    pub fn merge(&mut self, other: &Self) {
        self.settle(other.at_ms);
        let left = decay(self.at_ms.saturating_sub(other.at_ms));
        for (bin, more) in self.bins.iter_mut().zip(&other.bins) {
            bin.requests += more.requests * left;
            bin.tokens += more.tokens * left;
        }
    }

    /// True without traffic.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bins.iter().all(|bin| bin.requests == 0.0)
    }

    /// Requests seen, each by what is left of it.
    #[must_use]
    pub fn requests(&self) -> f64 {
        self.bins.iter().map(|bin| bin.requests).sum()
    }

    /// The bins with traffic, shortest lengths first.
    pub fn slices(&self, mode: BucketServeMode) -> impl Iterator<Item = Slice> {
        let bins = self.bins.iter().enumerate();
        bins.filter(|(_, bin)| bin.requests > 0.0)
            .map(move |(at, bin)| {
                let first = FIRST.get(at).copied().unwrap_or_default();
                let next = FIRST.get(at.saturating_add(1));
                let last = next.map_or(u64::MAX, |next| next.saturating_sub(1));
                Slice {
                    first,
                    last,
                    // Saturates; the mean of a bin lies inside it but for rounding.
                    mean: ((bin.tokens / bin.requests) as u64).clamp(first, last),
                    weight: match mode {
                        BucketServeMode::Throughput => bin.tokens,
                        BucketServeMode::Rps => bin.requests,
                    },
                }
            })
    }

    /// The stored form: format (1 byte), hash of the model's name (8), time (8), then requests and
    /// tokens of every bin (8 each), little-endian.
    #[must_use]
    pub fn encode(&self, model: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + BINS * ENTRY);
        out.push(FORMAT);
        out.extend_from_slice(&model.to_le_bytes());
        out.extend_from_slice(&self.at_ms.to_le_bytes());
        for bin in &self.bins {
            out.extend_from_slice(&bin.requests.to_bits().to_le_bytes());
            out.extend_from_slice(&bin.tokens.to_bits().to_le_bytes());
        }
        out
    }

    /// Reads the stored form; `None` when it is another model's, of another format or no record.
    #[must_use]
    pub fn decode(bytes: &[u8], model: u64) -> Option<Self> {
        let (head, entries) = bytes.split_at_checked(HEAD)?;
        if *head.first()? != FORMAT || u64_at(head, 1) != model || entries.len() != BINS * ENTRY {
            return None;
        }
        let number = |raw: &[u8], at| {
            let number = f64::from_bits(u64_at(raw, at));
            (0.0..=ABSURD).contains(&number).then_some(number)
        };
        let bins: Option<Vec<Bin>> = entries
            .chunks_exact(ENTRY)
            .map(|raw| {
                Some(Bin {
                    requests: number(raw, 0)?,
                    tokens: number(raw, 8)?,
                })
            })
            .collect();
        Some(Self {
            at_ms: u64_at(head, 9),
            bins: bins?,
        })
    }
}

/// What is left of traffic after a time: `2^(-passed / half-life)`.
fn decay(passed_ms: u64) -> f64 {
    libm::exp2(-(passed_ms as f64) / HALF_LIFE_MS as f64)
}

/// The bin of a length: `floor(8 · log2 length)`, at most the last.
fn bin_of(tokens: u64) -> usize {
    FIRST
        .partition_point(|first| *first <= tokens)
        .saturating_sub(1)
}

#[allow(clippy::indexing_slicing, reason = "the compiler evaluates it")]
const fn first_lengths() -> [u64; BINS] {
    /// `2^(n / 8)` in units of `2^-48`, cut off.
    const ROOTS: [u64; 8] = [
        281_474_976_710_656,
        306_950_638_654_743,
        334_732_044_999_537,
        365_027_883_442_850,
        398_065_729_532_860,
        434_093_756_164_621,
        473_382_597_799_226,
        516_227_383_409_224,
    ];
    let mut out = [0; BINS];
    let mut bin = 1;
    while bin < BINS {
        let scaled = (ROOTS[bin % 8] as u128) << (bin / 8);
        out[bin] = scaled.div_ceil(1 << 48) as u64;
        bin += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use BucketServeMode::{Rps, Throughput};

    fn of(lengths: &[u64]) -> Histogram {
        let mut traffic = Histogram::new(0);
        lengths.iter().for_each(|tokens| traffic.record(*tokens, 0));
        traffic
    }

    #[test]
    fn bins_are_eight_to_the_octave() {
        // 8 · log2 of 3 is 12.7, of 5 is 18.6, of 100 is 53.2, of 30,000 is 119.0 (118.98).
        for (tokens, bin) in [
            (0, 0),
            (1, 0),
            (2, 8),
            (3, 12),
            (4, 16),
            (5, 18),
            (100, 53),
            (1023, 79),
            (1024, 80),
            (30_000, 118),
            ((1 << 21) - 1, 167),
            (1 << 21, 167),
            (u64::MAX, 167),
        ] {
            assert_eq!(bin_of(tokens), bin, "{tokens}");
        }
        for tokens in 1..200_000_u64 {
            let exact = (8.0 * libm::log2(tokens as f64)) as usize;
            assert_eq!(bin_of(tokens), exact, "{tokens}");
        }
    }

    #[test]
    fn slices_are_the_bins_with_traffic_in_the_unit_of_the_mode() {
        let traffic = of(&[0, 1, 100, 104, 104, u64::MAX]);
        let expected = [
            (0, 1, 1, 1.0, 1.0),
            (99, 107, 102, 3.0, 308.0),
            (1_923_097, u64::MAX, 2_097_152, 1.0, 2_097_152.0),
        ];
        for (at, (first, last, mean, requests, tokens)) in expected.into_iter().enumerate() {
            for (mode, weight) in [(Rps, requests), (Throughput, tokens)] {
                let slice = Slice {
                    first,
                    last,
                    mean,
                    weight,
                };
                assert_eq!(traffic.slices(mode).nth(at), Some(slice));
            }
        }
        assert_eq!(traffic.slices(Rps).count(), expected.len());
    }

    #[test]
    fn traffic_halves_every_thirty_seconds_and_is_forgotten_after_ten_minutes() {
        let mut traffic = of(&[100; 8]);
        traffic.settle(30_000);
        assert_eq!(traffic.requests(), 4.0);
        traffic.settle(29_000);
        assert_eq!(traffic.requests(), 4.0);
        traffic.record(200, 90_000);
        assert_eq!(traffic.requests(), 2.0);
        traffic.settle(690_000);
        assert!(!traffic.is_empty());
        traffic.settle(690_001);
        assert!(traffic.is_empty());
        let mut old = of(&[1]);
        old.settle(u64::MAX);
        assert!(old.is_empty());
    }

    #[test]
    fn merging_does_not_mind_the_order() {
        let early = of(&[10, 1000, 1000]);
        let mut late = Histogram::new(30_000);
        late.record(1000, 30_000);
        let (mut one, mut other) = (early.clone(), late.clone());
        one.merge(&late);
        other.merge(&early);
        assert_eq!(one, other);
        // 10 and 2 × 1000 halved, and 1000.
        let weights: Vec<f64> = one.slices(Throughput).map(|slice| slice.weight).collect();
        assert_eq!(weights, [5.0, 2000.0]);
    }

    #[test]
    fn the_stored_form_is_read_back_and_nothing_else_is() {
        let traffic = of(&[1, 70, 5000]);
        let bytes = traffic.encode(7);
        assert_eq!(bytes.len(), 2705);
        assert_eq!(Histogram::decode(&bytes, 7), Some(traffic));
        assert_eq!(Histogram::decode(&bytes, 8), None);
        assert_eq!(Histogram::decode(&bytes[..2704], 7), None);
        assert_eq!(Histogram::decode(&[], 7), None);
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e31] {
            let mut broken = bytes.clone();
            broken[HEAD..HEAD + 8].copy_from_slice(&bad.to_bits().to_le_bytes());
            assert_eq!(Histogram::decode(&broken, 7), None, "{bad}");
        }
        let mut other = bytes;
        other[0] = crate::OTHER_FORMAT;
        assert_eq!(Histogram::decode(&other, 7), None);
    }
}
