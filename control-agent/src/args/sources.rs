//! Values from flags, environment and file, and their validation.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use clap::ArgMatches;
use pd_wire::tokenizer::{MAX_NAME, MAX_TOKENIZERS};
use serde_json::Value;

use super::settings::{SETTINGS, Setting, default};
use super::{Invocation, Log, LogFormat, Refusal};
use crate::backoff::random_word;
use crate::push::{Credentials, EnvoyUrl};
use crate::tokenizers::Source;

/// Variable with the token: a flag would show it to every process.
const TOKEN_VARIABLE: &str = "PD_AGENT_TOKEN";

/// Values of one setting and where they are from.
#[derive(Clone, Debug)]
struct Given {
    place: String,
    values: Vec<String>,
    lenient: bool,
}

/// All settings given, and the mistakes found so far.
pub(super) struct Sources<'a> {
    given: BTreeMap<&'static str, Given>,
    environment: &'a dyn Fn(&str) -> Option<String>,
    mistakes: Vec<String>,
    /// What was passed over.
    pub(super) warnings: Vec<String>,
}

impl<'a> Sources<'a> {
    pub(super) fn new(
        matches: &ArgMatches,
        environment: &'a dyn Fn(&str) -> Option<String>,
        settings: &[Setting],
    ) -> Self {
        let mut given = BTreeMap::new();
        for setting in settings {
            let flags = matches
                .get_many::<String>(setting.name)
                .into_iter()
                .flatten();
            let flags: Vec<String> = flags.filter(|value| !value.is_empty()).cloned().collect();
            let variable = environment(setting.variable).filter(|value| !value.trim().is_empty());
            let found = if !flags.is_empty() {
                Given {
                    place: format!("--{}", setting.name),
                    values: flags,
                    lenient: false,
                }
            } else if let Some(value) = variable {
                let values = if setting.many {
                    value
                        .split(',')
                        .map(|part| part.trim().to_owned())
                        .collect()
                } else {
                    vec![value]
                };
                Given {
                    place: setting.variable.to_owned(),
                    values,
                    lenient: setting.lenient,
                }
            } else {
                continue;
            };
            given.insert(setting.name, found);
        }
        Self {
            given,
            environment,
            mistakes: Vec::new(),
            warnings: Vec::new(),
        }
    }

    pub(super) fn finish(self, invocation: Invocation) -> Result<Invocation, Refusal> {
        if self.mistakes.is_empty() {
            Ok(invocation)
        } else {
            Err(Refusal::Mistakes(self.mistakes))
        }
    }

    fn mistake(&mut self, text: String) {
        self.mistakes.push(text);
    }

    /// Adds what only the file names.
    pub(super) fn read_file(&mut self, path: &Path) {
        let shown = path.display();
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => return self.mistake(format!("config file {shown}: {error}")),
        };
        let entries = match serde_norway::from_str::<Option<serde_json::Map<String, Value>>>(&text)
        {
            Ok(entries) => entries.unwrap_or_default(),
            Err(error) => return self.mistake(format!("config file {shown}: {error}")),
        };
        for (key, value) in entries {
            let place = format!("config file {shown}: {key}");
            let Some(setting) = SETTINGS.iter().find(|setting| setting.name == key) else {
                self.mistake(format!("{place}: no such setting"));
                continue;
            };
            let values = match value {
                Value::Null => continue,
                Value::Array(values) if setting.many => values.iter().map(scalar).collect(),
                value => scalar(&value).map(|value| vec![value]),
            };
            let Some(values) = values else {
                self.mistake(format!("{place}: not a plain value"));
                continue;
            };
            let given = Given {
                place,
                values,
                lenient: false,
            };
            self.given.entry(setting.name).or_insert(given);
        }
    }

    /// The single value of a setting; of repeated ones clap keeps none.
    fn value(&self, name: &str) -> Option<(Given, String)> {
        let given = self.given.get(name)?;
        let value = given.values.first()?.trim().to_owned();
        (!value.is_empty()).then(|| (given.clone(), value))
    }

    pub(super) fn pods_file(&mut self) -> PathBuf {
        let Some((given, value)) = self.value("pods-file") else {
            self.mistake("--pods-file: needed, there is no other source of pods".to_owned());
            return PathBuf::new();
        };
        if let Err(error) = std::fs::File::open(&value) {
            self.mistake(format!("{}: cannot read {value:?}: {error}", given.place));
        }
        value.into()
    }

    pub(super) fn envoys(&mut self) -> Vec<EnvoyUrl> {
        let Some(given) = self.given.get("envoy").cloned() else {
            self.mistake("--envoy: at least one is needed".to_owned());
            return Vec::new();
        };
        let mut envoys = Vec::new();
        for value in given.values {
            match value.trim().parse() {
                Ok(url) if envoys.contains(&url) => {
                    self.mistake(format!("{}: {value:?} is given twice", given.place));
                }
                Ok(url) => envoys.push(url),
                Err(wrong) => self.mistake(format!("{}: {value:?} is {wrong}", given.place)),
            }
        }
        envoys
    }

    pub(super) fn tokenizers(&mut self) -> Vec<Source> {
        let Some(given) = self.given.get("tokenizer").cloned() else {
            return Vec::new();
        };
        let place = given.place;
        let mut sources: Vec<Source> = Vec::new();
        for value in given.values {
            let pair = value.trim().split_once('=');
            let Some((model, path)) = pair
                .filter(|(model, path)| !path.is_empty() && (1..=MAX_NAME).contains(&model.len()))
            else {
                self.mistake(format!("{place}: {value:?} is not of the form MODEL=FILE"));
                continue;
            };
            let source = Source {
                model: model.to_owned(),
                path: path.into(),
            };
            if sources.iter().any(|other| other.model == model) {
                self.mistake(format!("{place}: model {model:?} is given twice"));
            } else if let Err(error) = source.read() {
                self.mistake(format!("{place}: {path:?}: {error}"));
            }
            sources.push(source);
        }
        if sources.len() > MAX_TOKENIZERS {
            let (given, most) = (sources.len(), MAX_TOKENIZERS);
            self.mistake(format!("{place}: {given} tokenizers, at most {most}"));
        }
        sources
    }

    pub(super) fn credentials(&mut self) -> Credentials {
        let token = (self.environment)(TOKEN_VARIABLE).filter(|token| !token.trim().is_empty());
        let (place, credentials) = match (self.value("token-file"), token) {
            (None, None) => return Credentials::None,
            (Some((given, path)), None) => (given.place, Credentials::File(path.into())),
            (None, Some(token)) => (TOKEN_VARIABLE.to_owned(), Credentials::Fixed(token)),
            (Some((given, _)), Some(_)) => {
                self.mistake(format!("{}: {TOKEN_VARIABLE} is set as well", given.place));
                return Credentials::None;
            }
        };
        if let Err(wrong) = credentials.header() {
            self.mistake(format!("{place}: {wrong}"));
        }
        credentials
    }

    pub(super) fn listen(&mut self) -> SocketAddr {
        let (place, value) = self.text("listen");
        value.parse().unwrap_or_else(|_| {
            self.mistake(format!("{place}: {value:?} is not of the form IP:PORT"));
            SocketAddr::from(([127, 0, 0, 1], 0))
        })
    }

    pub(super) fn agent_id(&mut self) -> String {
        let Some((given, id)) = self.value("agent-id") else {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            let host = Some(host.trim())
                .filter(|host| !host.is_empty())
                .unwrap_or("pd-agent");
            return format!("{host}-{:08x}", random_word() & 0xffff_ffff);
        };
        if id.len() > 253 || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
            let place = given.place;
            self.mistake(format!(
                "{place}: {id:?} is not 1 to 253 printable ASCII characters"
            ));
        }
        id
    }

    pub(super) fn log(&mut self) -> Log {
        let (place, value) = self.text("log-format");
        let format = match value.as_str() {
            "text" => LogFormat::Text,
            "json" => LogFormat::Json,
            _ => {
                self.mistake(format!("{place}: {value:?} is neither text nor json"));
                LogFormat::Text
            }
        };
        let (place, filter) = self.text("log-filter");
        if let Err(error) = tracing_subscriber::EnvFilter::try_new(&filter) {
            self.mistake(format!("{place}: {filter:?}: {error}"));
        }
        Log { format, filter }
    }

    /// Value of a setting that has a default, and where it is from.
    fn text(&self, name: &str) -> (String, String) {
        self.value(name)
            .map(|(given, value)| (given.place, value))
            .unwrap_or_else(|| (format!("--{name}"), default(name).to_owned()))
    }

    pub(super) fn number(&mut self, name: &str, range: RangeInclusive<u64>) -> u64 {
        let default = default(name).parse().unwrap_or(*range.start());
        let Some((given, value)) = self.value(name) else {
            return default;
        };
        if let Ok(number) = value.parse()
            && range.contains(&number)
        {
            return number;
        }
        let (least, most) = (range.start(), range.end());
        let text = format!(
            "{}: {value:?} is not a number from {least} to {most}",
            given.place
        );
        if given.lenient {
            self.warnings.push(format!("{text}: {default}"));
        } else {
            self.mistake(text);
        }
        default
    }
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        _ => None,
    }
}
