//! Settings: one table of name, default, range, variable, profile field and reader.

mod choices;

pub use choices::{
    BucketServeMode, Choice, DecodePolicy, KvConnector, PrefillFallback, PrefillPolicy, Strategy,
    TrtScheduleStyle,
};

use serde::{Deserialize, Serialize};

/// Knobs that a profile overrides, by camelCase name; validated when parsed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Overrides(pub std::collections::BTreeMap<String, serde_json::Value>);

impl Overrides {
    /// True when nothing is overridden.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
