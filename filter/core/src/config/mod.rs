//! Settings in force: the plugin config, the variables below it, and what a profile makes of them
//! for one request.
//!
//! A plugin config is taken as a whole or not at all, with every mistake named. Everything is
//! parsed here once; per request only ready values are put together.

mod resolve;

pub use resolve::{RequestHints, Resolved, StrategySource, UnknownStrategy, resolve};

use pd_wire::knobs::{KNOBS, Knob, Knobs, Mistake, Reader, excerpt};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value as Json;
use std::sync::Arc;

/// Settings of this Envoy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Settings of requests whose profile changes none.
    pub knobs: Arc<Knobs>,
    /// What should be logged once.
    pub warnings: Vec<String>,
}

impl Config {
    /// Parses a plugin config (JSON object, camelCase; blank = nothing set). Knobs that it does
    /// not set come from their variables, then from their defaults.
    ///
    /// # Errors
    /// Every mistake of the plugin config, and variables that no default may replace.
    pub fn parse(
        plugin_config: &[u8],
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Config, Vec<Mistake>> {
        let fields = parse_fields(plugin_config).map_err(|mistake| vec![mistake])?;
        let mut knobs = Knobs::default();
        let mut mistakes = Vec::new();
        let mut warnings = Vec::new();
        let mut given: Vec<&str> = Vec::with_capacity(fields.len());
        for (name, json) in &fields {
            if given.contains(&name.as_str()) {
                mistakes.push(mistake(name, "given twice", "give every setting once"));
                continue;
            }
            given.push(name);
            let Some(knob) = Knob::find(name) else {
                mistakes.push(unknown(name));
                continue;
            };
            match knob.kind.parse_json(json) {
                Some(value) => {
                    knobs.set(name, &value);
                }
                None => mistakes.push(Mistake::of(knob, name, &json.to_string())),
            }
            if knob.reader == Reader::Agent {
                warnings.push(format!(
                    "{name} is read by the control agent; in the plugin config it does nothing"
                ));
            }
        }
        let wrong = knobs.apply_variables(Reader::Filter, |name| given.contains(&name), variable);
        mistakes.extend(wrong.refused);
        if !mistakes.is_empty() {
            return Err(mistakes);
        }
        warnings.extend(
            wrong
                .warnings
                .iter()
                .map(|mistake| format!("{mistake}; the default is used")),
        );
        warn_about_combinations(&mut knobs, &mut warnings);
        Ok(Config {
            knobs: Arc::new(knobs),
            warnings,
        })
    }

    /// The settings in force by camelCase name, for the status report: `null` when unset, of the
    /// control tokens only their number.
    pub fn report(&self) -> serde_json::Map<String, Json> {
        KNOBS
            .iter()
            .filter(|knob| knob.reader == Reader::Filter)
            .map(|knob| {
                let value = self.knobs.get(knob.name);
                let json = value.map_or(Json::Null, |value| value.to_json());
                (knob.name.to_owned(), json)
            })
            .collect()
    }
}

/// Settings that are legal alone and do less than they seem to.
fn warn_about_combinations(knobs: &mut Knobs, warnings: &mut Vec<String>) {
    if knobs.bucket_serve && !knobs.prompt_length_bucketing {
        warnings.push(
            "bucketServe (AIBRIX_BUCKET_SERVE) does nothing without promptLengthBucketing \
             (AIBRIX_PROMPT_LENGTH_BUCKETING)"
                .to_owned(),
        );
    }
    knobs.settle();
    if !knobs
        .prefix_cache_tokenizer_type
        .eq_ignore_ascii_case("character")
    {
        warnings.push(format!(
            "prefixCacheTokenizerType (AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE): prompts are cut by \
             bytes (character), not by {}",
            excerpt(&knobs.prefix_cache_tokenizer_type)
        ));
    }
}

fn mistake(field: &str, value: &str, allowed: &str) -> Mistake {
    Mistake {
        field: excerpt(field),
        value: value.to_owned(),
        allowed: allowed.to_owned(),
    }
}

/// A field no knob has, with the name that was probably meant.
fn unknown(name: &str) -> Mistake {
    let meant = KNOBS.iter().find(|knob| {
        knob.name
            .eq_ignore_ascii_case(&name.replace(['_', '-'], ""))
            || knob.variable == Some(name)
            || knob
                .profile
                .is_some_and(|path| path.ends_with(&format!(".{name}")))
    });
    let allowed = match meant {
        Some(knob) => format!("write {}", knob.name),
        None => "there is no such setting".to_owned(),
    };
    mistake(name, "this name", &allowed)
}

fn parse_fields(text: &[u8]) -> Result<Vec<(String, Json)>, Mistake> {
    const ALLOWED: &str = "give a JSON object of settings, or nothing";
    if text.trim_ascii().is_empty() {
        return Ok(Vec::new());
    }
    serde_json::from_slice::<Fields>(text)
        .map(|fields| fields.0)
        .map_err(|error| mistake("JSON", &excerpt(&error.to_string()), ALLOWED))
}

/// Fields of an object in their order, repeated names included.
struct Fields(Vec<(String, Json)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Fields;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    fields.push(entry);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests;
