//! Metrics: ids are handed out per VM, values live in the process by name, as Envoy's stats do.

use std::collections::BTreeMap;

use super::Status;

/// The kinds of the ABI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Only grows.
    Counter,
    /// Can be set and moved both ways.
    Gauge,
    /// A set of recorded samples.
    Histogram,
}

/// Values by name, shared by all VMs of a gateway.
#[derive(Debug, Default)]
pub struct Meters {
    counters: BTreeMap<String, u64>,
    gauges: BTreeMap<String, u64>,
    histograms: BTreeMap<String, Vec<u64>>,
}

/// The metrics one VM defined; an id's low two bits are its kind, as in Envoy.
#[derive(Debug, Default)]
pub(crate) struct Defined(Vec<(Kind, String)>);

// === impl Defined ===

impl Defined {
    pub(crate) fn define(&mut self, kind: u32, name: String) -> Result<(Kind, u32), Status> {
        let kind = match kind {
            0 => Kind::Counter,
            1 => Kind::Gauge,
            2 => Kind::Histogram,
            _ => return Err(Status::BadArgument),
        };
        self.0.push((kind, name));
        Ok((kind, ((self.0.len() as u32) << 2) | kind as u32))
    }

    pub(crate) fn find(&self, id: u32) -> Result<(Kind, &str), Status> {
        let at = (id >> 2).checked_sub(1).ok_or(Status::NotFound)?;
        match self.0.get(at as usize) {
            Some((kind, name)) if *kind as u32 == id & 3 => Ok((*kind, name)),
            _ => Err(Status::NotFound),
        }
    }
}

// === impl Meters ===

impl Meters {
    pub(crate) fn define(&mut self, kind: Kind, name: &str) {
        match kind {
            Kind::Counter => drop(self.counters.entry(name.to_owned()).or_default()),
            Kind::Gauge => drop(self.gauges.entry(name.to_owned()).or_default()),
            Kind::Histogram => drop(self.histograms.entry(name.to_owned()).or_default()),
        }
    }

    /// A counter refuses anything that is not an increase, a histogram any increment.
    pub(crate) fn increment(&mut self, kind: Kind, name: &str, by: i64) -> Result<(), Status> {
        match kind {
            Kind::Counter if by > 0 => {
                *self.counters.entry(name.to_owned()).or_default() += by.unsigned_abs();
                Ok(())
            }
            Kind::Gauge => {
                let value = self.gauges.entry(name.to_owned()).or_default();
                *value = value.wrapping_add_signed(by);
                Ok(())
            }
            Kind::Counter | Kind::Histogram => Err(Status::BadArgument),
        }
    }

    pub(crate) fn record(&mut self, kind: Kind, name: &str, value: u64) {
        match kind {
            Kind::Counter => *self.counters.entry(name.to_owned()).or_default() += value,
            Kind::Gauge => *self.gauges.entry(name.to_owned()).or_default() = value,
            Kind::Histogram => self
                .histograms
                .entry(name.to_owned())
                .or_default()
                .push(value),
        }
    }

    pub(crate) fn get(&self, kind: Kind, name: &str) -> Result<u64, Status> {
        match kind {
            Kind::Counter => Ok(self.counter(name)),
            Kind::Gauge => Ok(self.gauge(name)),
            Kind::Histogram => Err(Status::BadArgument),
        }
    }

    /// Value of a counter; zero when nobody defined it.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or_default()
    }

    /// Value of a gauge; zero when nobody defined it.
    pub fn gauge(&self, name: &str) -> u64 {
        self.gauges.get(name).copied().unwrap_or_default()
    }

    /// Samples of a histogram, in the order recorded.
    pub fn histogram(&self, name: &str) -> Vec<u64> {
        self.histograms.get(name).cloned().unwrap_or_default()
    }

    /// Names of every metric defined, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self
            .counters
            .keys()
            .chain(self.gauges.keys())
            .chain(self.histograms.keys())
            .cloned()
            .collect();
        names.sort();
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_increment_that_is_no_increase_is_an_error_for_a_counter_only() {
        let mut meters = Meters::default();
        assert_eq!(
            meters.increment(Kind::Counter, "c", 0),
            Err(Status::BadArgument)
        );
        assert_eq!(
            meters.increment(Kind::Counter, "c", -1),
            Err(Status::BadArgument)
        );
        assert_eq!(meters.increment(Kind::Gauge, "g", 5), Ok(()));
        assert_eq!(meters.increment(Kind::Gauge, "g", -2), Ok(()));
        assert_eq!((meters.counter("c"), meters.gauge("g")), (0, 3));
    }

    #[test]
    fn two_vms_defining_one_name_share_its_value() {
        let (mut one, mut two, mut meters) =
            (Defined::default(), Defined::default(), Meters::default());
        two.define(1, "other".into()).unwrap();
        for defined in [&mut one, &mut two] {
            let (_, id) = defined.define(0, "requests".into()).unwrap();
            let (kind, name) = defined.find(id).unwrap();
            meters.increment(kind, name, 1).unwrap();
        }
        assert_eq!(meters.counter("requests"), 2);
        assert_eq!(one.find(999), Err(Status::NotFound));
    }
}
