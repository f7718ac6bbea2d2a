//! Members of the annotation's objects, to tell which of those given are not known.

use crate::knobs::{KNOBS, excerpt};
use crate::spelling::closest;
use serde_json::{Map, Value as Json};

/// Most unknown members of one object that are named.
const NAMED: usize = 8;

/// An object of the annotation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Object {
    /// The annotation itself.
    Root,
    /// A profile.
    Profile,
    /// A profile's `routingConfig`.
    Routing,
    /// An object inside `routingConfig`.
    Section(&'static str),
}

/// Members that are no knobs.
const MEMBERS: [(Object, &str); 15] = [
    (Object::Root, "lockedRoutingStrategy"),
    (Object::Root, "defaultProfile"),
    (Object::Root, "profiles"),
    (Object::Profile, "routingStrategy"),
    (Object::Profile, "requestsPerSecond"),
    (Object::Profile, "routingConfig"),
    (Object::Routing, "combined"),
    (Object::Routing, "promptLenBucketMinLength"),
    (Object::Routing, "promptLenBucketMaxLength"),
    (Object::Routing, "promptTokensGte"),
    (Object::Routing, "promptTokensLt"),
    (Object::Routing, "maxTokensGte"),
    (Object::Routing, "maxTokensLt"),
    (Object::Routing, "pd"),
    (Object::Routing, "prefixCache"),
];

/// Members of AIBrix for strategies that do not exist here; passed over in silence.
const IGNORED: [(Object, &str); 4] = [
    (Object::Routing, "loadBalance"),
    (Object::Routing, "preble"),
    (Object::Routing, "vtc"),
    (Object::Routing, "autoBlend"),
];

fn members() -> impl Iterator<Item = (Object, &'static str)> {
    let knobs = KNOBS.iter().filter_map(|knob| knob.profile);
    let knobs = knobs.map(|path| match path.split_once('.') {
        Some((section, name)) => (Object::Section(section), name),
        None => (Object::Routing, path),
    });
    MEMBERS.into_iter().chain(knobs)
}

/// A line for every member of `object`, found at `path`, that is not known. One that belongs to a
/// section and stands beside it is left to the caller.
pub(super) fn unknown(object: Object, path: &str, map: &Map<String, Json>) -> Vec<String> {
    let is_known = |name: &str| {
        members().chain(IGNORED).any(|(place, known)| {
            known == name
                && (place == object
                    || object == Object::Routing && matches!(place, Object::Section(_)))
        })
    };
    let mut names = map
        .iter()
        .filter(|(name, value)| !value.is_null() && !is_known(name))
        .map(|(name, _)| name.as_str());
    let dot = if path.is_empty() { "" } else { "." };
    let mut lines: Vec<String> = names
        .by_ref()
        .take(NAMED)
        .map(|name| {
            let meant = meant(object, name);
            let name = excerpt(name);
            format!("{path}{dot}{name}: there is no such member, it does nothing{meant}")
        })
        .collect();
    let more = names.count();
    if more > 0 {
        let path = if path.is_empty() { "annotation" } else { path };
        lines.push(format!("{path}: {more} more members do not exist"));
    }
    lines
}

/// Where a name belongs that is known elsewhere, else the name that is spelt much like it.
fn meant(object: Object, name: &str) -> String {
    if let Some((place, name)) = members().find(|(_, known)| *known == name) {
        return match place {
            Object::Root => format!("; {name} belongs at the top of the annotation"),
            Object::Profile => format!("; a profile has it, give it as {name} there"),
            Object::Routing => format!("; a profile has it, give it as routingConfig.{name} there"),
            Object::Section(section) => {
                format!("; a profile has it, give it as routingConfig.{section}.{name} there")
            }
        };
    }
    let beside = members().filter(|(place, _)| *place == object);
    match closest(name, beside.map(|(_, name)| name)) {
        Some(known) => format!("; did you mean {known}?"),
        None => String::new(),
    }
}
