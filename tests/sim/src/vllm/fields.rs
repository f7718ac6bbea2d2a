//! The members of a request body that matter, borrowed from it, and their readers.
//!
//! As in vLLM: `null` is absent, unknown members are ignored, the last of duplicates wins, and
//! numbers may stand in strings. What is not read is skipped, not built.

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::error::Refusal;

/// The members, as they stand in the body.
#[derive(Default)]
pub(super) struct Fields<'a> {
    pub(super) model: Option<&'a RawValue>,
    pub(super) messages: Option<&'a RawValue>,
    pub(super) prompt: Option<&'a RawValue>,
    pub(super) input: Option<&'a RawValue>,
    pub(super) stream: Option<&'a RawValue>,
    pub(super) stream_options: Option<&'a RawValue>,
    pub(super) max_tokens: Option<&'a RawValue>,
    pub(super) max_completion_tokens: Option<&'a RawValue>,
    pub(super) max_output_tokens: Option<&'a RawValue>,
    pub(super) min_tokens: Option<&'a RawValue>,
    pub(super) temperature: Option<&'a RawValue>,
    pub(super) n: Option<&'a RawValue>,
    pub(super) request_id: Option<&'a RawValue>,
    pub(super) return_token_ids: Option<&'a RawValue>,
    pub(super) kv_transfer_params: Option<&'a RawValue>,
}

#[derive(serde::Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum Field {
    Model,
    Messages,
    Prompt,
    Input,
    Stream,
    StreamOptions,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    MinTokens,
    Temperature,
    N,
    RequestId,
    ReturnTokenIds,
    KvTransferParams,
    #[serde(other)]
    Other,
}
// === impl Fields ===

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    // Derived code refuses duplicate keys; vLLM takes the last.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields = Fields::default();
        while let Some(field) = map.next_key()? {
            let slot = match field {
                Field::Model => &mut fields.model,
                Field::Messages => &mut fields.messages,
                Field::Prompt => &mut fields.prompt,
                Field::Input => &mut fields.input,
                Field::Stream => &mut fields.stream,
                Field::StreamOptions => &mut fields.stream_options,
                Field::MaxTokens => &mut fields.max_tokens,
                Field::MaxCompletionTokens => &mut fields.max_completion_tokens,
                Field::MaxOutputTokens => &mut fields.max_output_tokens,
                Field::MinTokens => &mut fields.min_tokens,
                Field::Temperature => &mut fields.temperature,
                Field::N => &mut fields.n,
                Field::RequestId => &mut fields.request_id,
                Field::ReturnTokenIds => &mut fields.return_token_ids,
                Field::KvTransferParams => &mut fields.kv_transfer_params,
                Field::Other => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            *slot = Some(map.next_value()?);
        }
        Ok(fields)
    }
}

// === readers ===

/// A member that is not `null`.
pub(super) fn present(raw: Option<&RawValue>) -> Option<&RawValue> {
    raw.filter(|raw| raw.get() != "null")
}

fn read<'a, T: Deserialize<'a>>(
    field: &str,
    raw: Option<&'a RawValue>,
    what: &str,
) -> Result<Option<T>, Refusal> {
    let Some(raw) = present(raw) else {
        return Ok(None);
    };
    let problem = || {
        Refusal::schema(
            format!("body.{field}"),
            &format!("Input should be a valid {what}"),
        )
    };
    serde_json::from_str(raw.get())
        .map(Some)
        .map_err(|_| problem())
}

/// A boolean.
pub(super) fn boolean(field: &str, raw: Option<&RawValue>) -> Result<Option<bool>, Refusal> {
    read(field, raw, "boolean")
}

/// A string.
pub(super) fn string(field: &str, raw: Option<&RawValue>) -> Result<Option<String>, Refusal> {
    read(field, raw, "string")
}

/// A number.
pub(super) fn number(field: &str, raw: Option<&RawValue>) -> Result<Option<f64>, Refusal> {
    let Some(raw) = present(raw) else {
        return Ok(None);
    };
    let value = raw.get().trim_matches('"').parse::<f64>();
    let problem = |_| Refusal::schema(format!("body.{field}"), "Input should be a valid number");
    value.map(Some).map_err(problem)
}

/// A whole number, `1.0` included.
pub(super) fn integer(field: &str, raw: Option<&RawValue>) -> Result<Option<i64>, Refusal> {
    match number(field, raw)? {
        None => Ok(None),
        Some(value) if value.fract() == 0.0 => Ok(Some(value as i64)),
        Some(_) => Err(Refusal::schema(
            format!("body.{field}"),
            "Input should be a valid integer",
        )),
    }
}

/// Whether `stream_options` ask for usage; they are refused without `stream`.
pub(super) fn stream_options(raw: Option<&RawValue>, stream: bool) -> Result<bool, Refusal> {
    #[derive(serde::Deserialize)]
    struct Options {
        include_usage: Option<bool>,
    }
    let Some(options) = read::<Options>("stream_options", raw, "dictionary")? else {
        return Ok(false);
    };
    if !stream {
        let message =
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)";
        let mut refusal = Refusal::value(Some("stream_options"), message.to_owned());
        refusal.schema = true;
        return Err(refusal);
    }
    Ok(options.include_usage.unwrap_or(false))
}
