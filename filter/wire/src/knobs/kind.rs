//! Types of settings: which values a knob accepts and how each source spells them.

use super::choices::Choice;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Type and range of a knob. Bounds are inclusive unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number.
    Integer {
        /// Smallest value.
        min: u64,
        /// Largest value.
        max: u64,
    },
    /// A number.
    Number {
        /// Smallest value.
        min: f64,
        /// Largest value.
        max: f64,
    },
    /// A number above 0.
    Positive {
        /// Largest value.
        max: f64,
    },
    /// A time; fractions are allowed, kept in whole milliseconds.
    Duration {
        /// Unit the value is given in.
        unit: Unit,
        /// Shortest time, in the unit.
        min: f64,
        /// Longest time, in the unit.
        max: f64,
    },
    /// One of these names.
    Choice(&'static [&'static str]),
    /// Text of at most 1024 bytes.
    Text,
    /// Text that is never shown.
    Secret,
    /// A list of SHA-256 hashes in hexadecimal.
    Hashes,
}

/// Longest text setting, in bytes.
const MAX_TEXT: usize = 1024;
/// Most hashes of a [`Kind::Hashes`] setting.
const MAX_HASHES: usize = 32;

/// Unit of a time setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Milliseconds.
    Milliseconds,
    /// Seconds.
    Seconds,
    /// Minutes.
    Minutes,
}

impl Unit {
    /// Milliseconds in one of the unit.
    pub fn millis(self) -> f64 {
        match self {
            Unit::Milliseconds => 1.0,
            Unit::Seconds => 1e3,
            Unit::Minutes => 6e4,
        }
    }

    /// Name in documentation.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Milliseconds => "ms",
            Unit::Seconds => "s",
            Unit::Minutes => "min",
        }
    }
}

/// A value of a knob in the knob's own unit.
///
/// Has a fixed set of variants, so that formats without a schema can carry it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Value {
    /// For [`Kind::Bool`].
    Bool(bool),
    /// For [`Kind::Integer`].
    Integer(u64),
    /// For [`Kind::Number`], [`Kind::Positive`] and [`Kind::Duration`].
    Number(f64),
    /// For [`Kind::Choice`], [`Kind::Text`] and [`Kind::Secret`].
    Text(String),
    /// For [`Kind::Hashes`].
    List(Vec<String>),
}

impl Value {
    /// The value as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Value::Bool(b) => (*b).into(),
            Value::Integer(n) => (*n).into(),
            Value::Number(n) => match whole(*n) {
                Some(n) => n.into(),
                None => (*n).into(),
            },
            Value::Text(t) => t.clone().into(),
            Value::List(l) => l.clone().into(),
        }
    }
}

/// `number` as an integer, if it is one that `f64` holds exactly.
fn whole(number: f64) -> Option<u64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    ((0.0..=EXACT).contains(&number) && number.fract() == 0.0).then_some(number as u64)
}

impl Kind {
    /// A setting that must never be shown.
    pub fn is_hidden(&self) -> bool {
        matches!(self, Kind::Secret | Kind::Hashes)
    }

    /// What is accepted, for messages and documentation.
    pub fn allowed(&self) -> String {
        match self {
            Kind::Bool => "give true or false".to_owned(),
            Kind::Integer { min, max } if *max == u64::MAX => {
                format!("give a whole number from {min} up, below 2^64")
            }
            Kind::Integer { min, max } => format!("give a whole number from {min} to {max}"),
            Kind::Number { min, max } => format!("give a number from {min} to {max}"),
            Kind::Positive { max } => format!("give a number above 0, at most {max}"),
            Kind::Duration { unit, min, max } => {
                format!("give a time from {min} to {max} {}", unit.name())
            }
            Kind::Choice(names) => format!("give one of {}", names.join(", ")),
            Kind::Text | Kind::Secret => format!("give text of at most {MAX_TEXT} bytes"),
            Kind::Hashes => {
                format!(
                    "give a list of at most {MAX_HASHES} SHA-256 hashes, 64 hexadecimal digits each"
                )
            }
        }
    }

    /// Whether `value` has the right type and lies in the range.
    pub fn accepts(&self, value: &Value) -> bool {
        match (self, value) {
            (Kind::Bool, Value::Bool(_)) => true,
            (Kind::Integer { min, max }, Value::Integer(n)) => (min..=max).contains(&n),
            (Kind::Number { min, max } | Kind::Duration { min, max, .. }, Value::Number(n)) => {
                n.is_finite() && (min..=max).contains(&n)
            }
            (Kind::Positive { max }, Value::Number(n)) => *n > 0.0 && n <= max,
            (Kind::Choice(names), Value::Text(t)) => names.contains(&t.as_str()),
            (Kind::Text | Kind::Secret, Value::Text(t)) => t.len() <= MAX_TEXT,
            (Kind::Hashes, Value::List(l)) => l.len() <= MAX_HASHES && l.iter().all(|h| is_hash(h)),
            _ => false,
        }
    }

    /// The value a JSON document gives, if it is accepted.
    ///
    /// Whole numbers may be written as floats (`1e6`): templating tools do that.
    pub fn parse_json(&self, json: &serde_json::Value) -> Option<Value> {
        use serde_json::Value as Json;
        let value = match (self, json) {
            (Kind::Bool, Json::Bool(b)) => Value::Bool(*b),
            (Kind::Integer { .. }, Json::Number(n)) => {
                Value::Integer(n.as_u64().or_else(|| n.as_f64().and_then(whole))?)
            }
            (
                Kind::Number { .. } | Kind::Positive { .. } | Kind::Duration { .. },
                Json::Number(n),
            ) => Value::Number(n.as_f64()?),
            (Kind::Choice(_) | Kind::Text | Kind::Secret, Json::String(t)) => {
                Value::Text(t.clone())
            }
            (Kind::Hashes, Json::Array(items)) => Value::List(
                items
                    .iter()
                    .map(|item| Some(item.as_str()?.to_ascii_lowercase()))
                    .collect::<Option<_>>()?,
            ),
            _ => return None,
        };
        self.accepts(&value).then_some(value)
    }

    /// The value an environment variable gives, if it is accepted.
    ///
    /// Booleans are those of Go's `ParseBool`, as AIBrix reads them; names are accepted in any
    /// case of letters.
    pub fn parse_text(&self, text: &str) -> Option<Value> {
        let text = match self {
            Kind::Secret => text,
            _ => text.trim(),
        };
        let value = match self {
            Kind::Bool => Value::Bool(match text {
                "1" | "t" | "T" | "TRUE" | "true" | "True" => true,
                "0" | "f" | "F" | "FALSE" | "false" | "False" => false,
                _ => return None,
            }),
            Kind::Integer { .. } => Value::Integer(text.parse().ok()?),
            Kind::Number { .. } | Kind::Positive { .. } | Kind::Duration { .. } => {
                Value::Number(text.parse().ok()?)
            }
            Kind::Choice(_) => Value::Text(text.to_ascii_lowercase()),
            Kind::Text | Kind::Secret => Value::Text(text.to_owned()),
            Kind::Hashes => Value::List(
                text.split(',')
                    .map(|hash| hash.trim().to_ascii_lowercase())
                    .collect(),
            ),
        };
        self.accepts(&value).then_some(value)
    }
}

fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Text that `Debug` does not show.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself; never log it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_empty() { "unset" } else { "hidden" })
    }
}

/// A field type of the typed settings.
pub(super) trait Setting: Sized {
    /// From a value that `kind` accepts; none for another type.
    fn from_value(value: &Value, kind: &Kind) -> Option<Self>;
    /// The value as documented and reported; none when unset or hidden.
    fn to_value(&self, kind: &Kind) -> Option<Value>;
}

impl Setting for bool {
    fn from_value(value: &Value, _: &Kind) -> Option<Self> {
        match value {
            Value::Bool(b) => Some(*b),
            _ => None,
        }
    }

    fn to_value(&self, _: &Kind) -> Option<Value> {
        Some(Value::Bool(*self))
    }
}

impl Setting for u64 {
    fn from_value(value: &Value, kind: &Kind) -> Option<Self> {
        match (kind, value) {
            (Kind::Duration { unit, .. }, Value::Number(n)) => {
                let millis = (n * unit.millis()).round();
                // The shortest time is one millisecond: rounding to 0 could mean "off".
                Some(if *n > 0.0 { millis.max(1.0) } else { 0.0 } as u64)
            }
            (_, Value::Integer(n)) => Some(*n),
            _ => None,
        }
    }

    fn to_value(&self, kind: &Kind) -> Option<Value> {
        Some(match kind {
            Kind::Duration { unit, .. } => Value::Number(*self as f64 / unit.millis()),
            _ => Value::Integer(*self),
        })
    }
}

impl Setting for Option<u64> {
    fn from_value(value: &Value, kind: &Kind) -> Option<Self> {
        u64::from_value(value, kind).map(Some)
    }

    fn to_value(&self, kind: &Kind) -> Option<Value> {
        self.and_then(|n| n.to_value(kind))
    }
}

impl Setting for f64 {
    fn from_value(value: &Value, _: &Kind) -> Option<Self> {
        match value {
            Value::Number(n) => Some(*n),
            _ => None,
        }
    }

    fn to_value(&self, _: &Kind) -> Option<Value> {
        Some(Value::Number(*self))
    }
}

impl<C: Choice> Setting for C {
    fn from_value(value: &Value, _: &Kind) -> Option<Self> {
        match value {
            Value::Text(t) => C::from_name(t),
            _ => None,
        }
    }

    fn to_value(&self, _: &Kind) -> Option<Value> {
        Some(Value::Text(self.name().to_owned()))
    }
}

impl<C: Choice> Setting for Option<C> {
    fn from_value(value: &Value, kind: &Kind) -> Option<Self> {
        C::from_value(value, kind).map(Some)
    }

    fn to_value(&self, kind: &Kind) -> Option<Value> {
        self.and_then(|choice| choice.to_value(kind))
    }
}

impl Setting for Arc<str> {
    fn from_value(value: &Value, _: &Kind) -> Option<Self> {
        match value {
            Value::Text(t) => Some(t.as_str().into()),
            _ => None,
        }
    }

    fn to_value(&self, _: &Kind) -> Option<Value> {
        (!self.is_empty()).then(|| Value::Text(self.to_string()))
    }
}

impl Setting for Secret {
    fn from_value(value: &Value, _: &Kind) -> Option<Self> {
        match value {
            Value::Text(t) => Some(Secret(t.clone())),
            _ => None,
        }
    }

    fn to_value(&self, _: &Kind) -> Option<Value> {
        None
    }
}

impl Setting for Arc<[String]> {
    fn from_value(value: &Value, _: &Kind) -> Option<Self> {
        match value {
            Value::List(l) => Some(l.as_slice().into()),
            _ => None,
        }
    }

    /// How many there are.
    fn to_value(&self, _: &Kind) -> Option<Value> {
        Some(Value::Integer(self.len() as u64))
    }
}
