//! From annotation text to [`ModelConfig`].

use super::members::{self, Object};
use super::{AUTO, AutoHints, ModelConfig, Profile};
use crate::knobs::{Choice, KNOBS, Kind, Knob, Mistake, Overrides, Strategy, Value, excerpt};
use serde_json::{Map, Value as Json};

impl ModelConfig {
    /// Parses the text of the annotation. No config when the text is blank, is not a JSON object,
    /// or holds neither profiles nor a lock. The second part says what was wrong, a line each.
    pub fn parse(text: &str) -> (Option<ModelConfig>, Vec<String>) {
        let mut reader = Reader::default();
        let config = reader.config(text);
        (config, reader.warnings)
    }
}

/// A JSON object and where it stands in the annotation.
#[derive(Clone, Copy)]
struct Fields<'a> {
    path: &'a str,
    map: &'a Map<String, Json>,
}

impl<'a> Fields<'a> {
    /// The value of a field that is given and not `null`.
    fn get(&self, name: &str) -> Option<&'a Json> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn path_of(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }
}

#[derive(Default)]
struct Reader {
    warnings: Vec<String>,
}

impl Reader {
    fn config(&mut self, text: &str) -> Option<ModelConfig> {
        if is_blank(text) {
            return None;
        }
        let map = match serde_json::from_str::<Json>(text) {
            Ok(Json::Object(map)) => map,
            Ok(other) => {
                self.warn(
                    "",
                    &other,
                    "the annotation must be a JSON object; it is ignored",
                );
                return None;
            }
            Err(error) => {
                self.warnings.push(format!(
                    "the annotation is not JSON ({error}); it is ignored"
                ));
                return None;
            }
        };
        let root = Fields {
            path: "",
            map: &map,
        };
        self.unknown(Object::Root, root);
        let config = ModelConfig {
            locked_routing_strategy: self.strategy(root, "lockedRoutingStrategy"),
            default_profile: self.text(root, "defaultProfile"),
            profiles: self.profiles(root),
        };
        if config.profiles.is_empty() && config.locked_routing_strategy.is_none() {
            self.warnings.push(
                "the annotation has neither profiles nor a lockedRoutingStrategy; it is ignored"
                    .to_owned(),
            );
            return None;
        }
        if let Some(name) = &config.default_profile
            && !config.profiles.contains_key(name)
        {
            self.warnings.push(format!(
                "defaultProfile: there is no profile {:?}; requests that name no profile get none",
                excerpt(name)
            ));
        }
        Some(config)
    }

    fn profiles(&mut self, root: Fields<'_>) -> std::collections::BTreeMap<String, Profile> {
        let mut profiles = std::collections::BTreeMap::new();
        let Some(map) = self.object(root, "profiles") else {
            return profiles;
        };
        for (name, json) in map {
            let path = format!("profiles.{}", excerpt(name));
            let Json::Object(map) = json else {
                self.warn(&path, json, "give an object");
                continue;
            };
            if name.eq_ignore_ascii_case(AUTO) {
                self.warnings.push(format!(
                    "{path}: requests cannot name this profile, {AUTO:?} means \"choose by size\""
                ));
            }
            profiles.insert(name.clone(), self.profile(Fields { path: &path, map }));
        }
        profiles
    }

    fn profile(&mut self, fields: Fields<'_>) -> Profile {
        let mut profile = Profile {
            routing_strategy: self.strategy(fields, "routingStrategy"),
            requests_per_second: self.limit(fields, "requestsPerSecond"),
            ..Profile::default()
        };
        self.unknown(Object::Profile, fields);
        if let Some(map) = self.object(fields, "routingConfig") {
            let path = fields.path_of("routingConfig");
            self.routing_config(Fields { path: &path, map }, &mut profile);
        }
        profile
    }

    fn routing_config(&mut self, fields: Fields<'_>, profile: &mut Profile) {
        profile.combined = self.flag(fields, "combined");
        self.prompt_range(fields, profile);
        profile.auto = AutoHints {
            prompt_tokens_gte: self.count(fields, "promptTokensGte"),
            prompt_tokens_lt: self.count(fields, "promptTokensLt"),
            max_tokens_gte: self.count(fields, "maxTokensGte"),
            max_tokens_lt: self.count(fields, "maxTokensLt"),
        };
        self.unknown(Object::Routing, fields);
        for section in ["pd", "prefixCache"] {
            if let Some(map) = self.object(fields, section) {
                let path = &fields.path_of(section);
                self.unknown(Object::Section(section), Fields { path, map });
            }
        }
        for knob in KNOBS {
            self.knob(fields, knob, &mut profile.knobs);
        }
    }

    fn knob(&mut self, fields: Fields<'_>, knob: &Knob, overrides: &mut Overrides) {
        let Some(path) = knob.profile else { return };
        let (map, name) = match path.split_once('.') {
            Some((section, name)) => {
                if let Some(json) = fields.get(name) {
                    self.warn(
                        &fields.path_of(name),
                        json,
                        &format!("it is not read here, give it as {}", fields.path_of(path)),
                    );
                }
                (fields.map.get(section).and_then(Json::as_object), name)
            }
            None => (Some(fields.map), path),
        };
        let Some(json) = map.and_then(|map| map.get(name)).filter(|v| !v.is_null()) else {
            return;
        };
        if matches!(knob.kind, Kind::Choice(_)) && json.as_str().is_some_and(is_blank) {
            return;
        }
        let accepted = spelling(knob, json).is_some_and(|value| overrides.set(knob, value));
        let field = fields.path_of(path);
        if !accepted {
            let mistake = Mistake::of(knob, &field, &json.to_string());
            self.warnings.push(mistake.to_string());
        } else if knob.name == "promptLengthBucketing" && json == &Json::Bool(true) {
            self.warnings.push(format!(
                "{field}: a profile may switch bucketing off, not on; \
                 AIBRIX_PROMPT_LENGTH_BUCKETING decides"
            ));
        } else if knob.name == "decodeScorePolicy"
            && overrides
                .get(knob.name)
                .is_some_and(|value| !knob.kind.accepts(value))
        {
            let mistake = Mistake::of(knob, &field, &json.to_string());
            self.warnings
                .push(format!("{mistake}; requests of this profile fail with 503"));
        }
    }

    /// Below 0 counts as 0; a largest length that is 0 or missing is no limit; one below the
    /// smallest length, or below 0, matches nothing.
    fn prompt_range(&mut self, fields: Fields<'_>, profile: &mut Profile) {
        const MAX: &str = "promptLenBucketMaxLength";
        let min = self.integer(fields, "promptLenBucketMinLength");
        profile.prompt_min = u64::try_from(min.unwrap_or(0)).unwrap_or(0);
        match self.integer(fields, MAX) {
            None | Some(0) => {}
            Some(max) => {
                profile.prompt_max = Some(u64::try_from(max).unwrap_or(0));
                if max < 0 {
                    profile.prompt_min = profile.prompt_min.max(1);
                }
            }
        }
        if let Some(max) = profile.prompt_max
            && max < profile.prompt_min
        {
            self.warnings.push(format!(
                "{}: no prompt length lies between the smallest and the largest length, \
                 so the pod takes none",
                fields.path_of(MAX)
            ));
        }
    }

    fn object<'a>(&mut self, fields: Fields<'a>, name: &str) -> Option<&'a Map<String, Json>> {
        match fields.get(name)? {
            Json::Object(map) => Some(map),
            other => {
                self.warn(&fields.path_of(name), other, "give an object");
                None
            }
        }
    }

    /// Trimmed text; blank counts as not given.
    fn text(&mut self, fields: Fields<'_>, name: &str) -> Option<String> {
        match fields.get(name)? {
            Json::String(text) => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
            other => {
                self.warn(&fields.path_of(name), other, "give text");
                None
            }
        }
    }

    /// The name is kept even when unknown: a newer filter may know it.
    fn strategy(&mut self, fields: Fields<'_>, name: &str) -> Option<String> {
        let text = self.text(fields, name)?;
        if Strategy::from_name(&text).is_none() {
            let allowed = Kind::Choice(Strategy::NAMES).allowed();
            self.warn(&fields.path_of(name), &Json::String(text.clone()), &allowed);
        }
        Some(text)
    }

    fn flag(&mut self, fields: Fields<'_>, name: &str) -> bool {
        match fields.get(name) {
            None => false,
            Some(Json::Bool(flag)) => *flag,
            Some(other) => {
                self.warn(&fields.path_of(name), other, &Kind::Bool.allowed());
                false
            }
        }
    }

    /// A whole number, also when written as a float.
    fn integer(&mut self, fields: Fields<'_>, name: &str) -> Option<i64> {
        let json = fields.get(name)?;
        let whole = match json {
            Json::Number(n) => n
                .as_i64()
                .or_else(|| n.as_f64().filter(|n| n.fract() == 0.0).map(|n| n as i64)),
            _ => None,
        };
        if whole.is_none() {
            self.warn(&fields.path_of(name), json, "give a whole number");
        }
        whole
    }

    /// A whole number that is not negative.
    fn count(&mut self, fields: Fields<'_>, name: &str) -> Option<u64> {
        let number = self.integer(fields, name)?;
        let count = u64::try_from(number).ok();
        if count.is_none() {
            self.warn(&fields.path_of(name), &number.into(), "give 0 or more");
        }
        count
    }

    /// A rate limit; 0 when not given.
    fn limit(&mut self, fields: Fields<'_>, name: &str) -> u32 {
        let count = self.count(fields, name).unwrap_or(0);
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    fn unknown(&mut self, object: Object, fields: Fields<'_>) {
        let lines = members::unknown(object, fields.path, fields.map);
        self.warnings.extend(lines);
    }

    fn warn(&mut self, field: &str, value: &Json, allowed: &str) {
        let mistake = Mistake {
            field: if field.is_empty() {
                "annotation"
            } else {
                field
            }
            .to_owned(),
            value: excerpt(&value.to_string()),
            allowed: allowed.to_owned(),
        };
        self.warnings.push(mistake.to_string());
    }
}

fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

/// The value of a knob as profiles spell it: names may stand between blanks, the decode policy
/// in any case of letters, as in AIBrix.
fn spelling(knob: &Knob, json: &Json) -> Option<Value> {
    match (knob.kind, json) {
        (Kind::Choice(_), Json::String(text)) => Some(Value::Text(match knob.name {
            "decodeScorePolicy" => text.trim().to_ascii_lowercase(),
            _ => text.trim().to_owned(),
        })),
        _ => knob.kind.parse_json(json),
    }
}
