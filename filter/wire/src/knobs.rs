//! Settings: one table of name, default, range, variable, profile field and reader.
//!
//! The table ([`KNOBS`], written in `knobs/table.rs`) feeds everything that deals with settings:
//! the typed [`Knobs`], parsing of the plugin config, of variables and of profiles, the
//! documentation, and the report of what is in force.
//!
//! Sources differ in how strict they are. A mistake in the plugin config refuses the whole
//! config; a bad variable or profile field is reported once and the value below it stands. In
//! every source `0` is accepted where it means "off" or "none", and times may be fractions.

mod choices;
mod kind;
mod overrides;
mod table;
mod variables;

pub use choices::{
    BucketServeMode, Choice, DecodePolicy, KvConnector, PrefillFallback, PrefillPolicy, Strategy,
    TrtScheduleStyle,
};
pub use kind::{Kind, Secret, Unit, Value};
pub use overrides::Overrides;
pub use table::{KNOBS, Knobs, TimersGiven};
pub use variables::Variables;

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Knob {
    /// Name in the plugin config.
    pub name: &'static str,
    /// What it does, one sentence or two.
    pub doc: &'static str,
    /// Type and range.
    pub kind: Kind,
    /// Program that reads it.
    pub reader: Reader,
    /// Environment variable.
    pub variable: Option<&'static str>,
    /// Path inside a profile's `routingConfig`; none: a profile cannot change it.
    pub profile: Option<&'static str>,
}

impl Knob {
    /// The row called `name`.
    pub fn find(name: &str) -> Option<&'static Knob> {
        KNOBS.iter().find(|knob| knob.name == name)
    }
}

/// Program that reads a knob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// The Envoy filter.
    Filter,
    /// The control agent.
    Agent,
}

impl Reader {
    /// Name in documentation.
    pub fn name(self) -> &'static str {
        match self {
            Reader::Filter => "filter",
            Reader::Agent => "agent",
        }
    }
}

/// A setting that was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value} is not allowed; {allowed}")]
pub struct Mistake {
    /// Field of the plugin config, variable, or path in the annotation.
    pub field: String,
    /// What was given, shortened; secrets are hidden.
    pub value: String,
    /// What is allowed there.
    pub allowed: String,
}

impl Mistake {
    /// A value that `knob` does not accept, found at `field`.
    pub fn of(knob: &Knob, field: impl Into<String>, value: &str) -> Self {
        let value = if knob.kind.is_hidden() {
            "the value given (hidden)".to_owned()
        } else {
            excerpt(value)
        };
        Self {
            field: field.into(),
            value,
            allowed: knob.kind.allowed(),
        }
    }
}

/// `text` without control characters and cut to 80 characters, for messages.
pub fn excerpt(text: &str) -> String {
    const MAX: usize = 80;
    let mut short: String = text
        .chars()
        .take(MAX)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.chars().nth(MAX).is_some() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests;
