//! Settings a profile changes for its requests.

use super::{Choice, DecodePolicy, KNOBS, Knob, Knobs, Value, excerpt};
use serde::{Deserialize, Serialize};

/// Name of the policy whose unknown values are kept, see [`Knobs::invalid_decode_policy`].
const DECODE_POLICY: &str = "decodeScorePolicy";

/// Knobs that a profile overrides, sparse, in the order of the table.
///
/// A plain list, so that both JSON and formats without a schema carry it. Values are checked when
/// a profile is parsed and again when they are applied, because agent and filter may be of
/// different versions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overrides(Vec<(String, Value)>);

impl Overrides {
    /// True when nothing is overridden.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// The value a knob is overridden with.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.iter().find(|(n, _)| *n == name).map(|(_, v)| v)
    }

    /// Overrides `knob`. False, and nothing changed, when a profile cannot change it or it does
    /// not accept the value; an unknown decode policy is kept, because requests under it must
    /// fail instead of being scored by another.
    pub fn set(&mut self, knob: &Knob, value: Value) -> bool {
        let kept = knob.name == DECODE_POLICY && matches!(value, Value::Text(_));
        if knob.profile.is_none() || !(kept || knob.kind.accepts(&value)) {
            return false;
        }
        self.0.retain(|(name, _)| name != knob.name);
        self.0.push((knob.name.to_owned(), value));
        true
    }
}

impl Knobs {
    /// These settings as a profile changes them. What no knob accepts is left out.
    pub fn with(&self, overrides: &Overrides) -> Knobs {
        let mut knobs = self.clone();
        for (name, value) in overrides.iter() {
            knobs.override_one(name, value);
        }
        knobs.settle();
        knobs
    }

    fn override_one(&mut self, name: &str, value: &Value) {
        let overridable = KNOBS.iter().any(|k| k.name == name && k.profile.is_some());
        match (name, value) {
            // Only off: what is off gateway-wide counts no lengths, and keeps none.
            ("promptLengthBucketing" | "bucketServe", Value::Bool(true)) => {}
            (DECODE_POLICY, Value::Text(text)) if DecodePolicy::from_name(text).is_none() => {
                self.invalid_decode_policy = Some(excerpt(text));
            }
            _ if overridable => {
                self.set(name, value);
            }
            _ => {}
        }
    }

    /// Makes settings that depend on each other consistent: adaptive bands need bucketing.
    pub fn settle(&mut self) {
        self.bucket_serve &= self.prompt_length_bucketing;
    }
}
