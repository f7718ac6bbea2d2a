//! Labels and annotations under `model.aibrix.ai/`: which exist and where, so that one that does
//! nothing is told.

use std::collections::BTreeMap;

use pd_wire::knobs::excerpt;
use pd_wire::names;
use pd_wire::spelling::closest;

const PREFIX: &str = "model.aibrix.ai/";
/// Most keys of one pod that are named.
const NAMED: usize = 8;

/// Where a key is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Label,
    Annotation,
    Either,
}

impl Place {
    fn name(self) -> &'static str {
        match self {
            Self::Label => "label",
            Self::Annotation => "annotation",
            Self::Either => "label or annotation",
        }
    }
}

/// Keys that are read.
const READ: [(&str, Place); 8] = [
    (names::LABEL_MODEL, Place::Either),
    (names::LABEL_PORT, Place::Label),
    (names::LABEL_ENGINE, Place::Label),
    (names::LABEL_METRIC_PORT, Place::Label),
    (names::LABEL_KV_CONNECTOR, Place::Label),
    (names::ANNOTATION_CONFIG, Place::Annotation),
    (names::ANNOTATION_BOOTSTRAP_PORT, Place::Annotation),
    (names::ANNOTATION_DRAIN, Place::Annotation),
];

/// Names behind the prefix that other parts of AIBrix read (autoscaler, controllers, KV events);
/// they are right on a pod and mean nothing to routing.
const OF_OTHERS: [&str; 9] = [
    "base-model",
    "kv-events-enabled",
    "lora-id",
    "min_replicas",
    "model-router-custom-paths",
    "scheduled-pods",
    "service-name",
    "warmup",
    "warmup-name",
];

type Map = Option<BTreeMap<String, String>>;

/// A line for every key of a pod that does nothing.
pub(super) fn idle(labels: &Map, annotations: &Map) -> Vec<String> {
    let labels = labels.iter().flatten().map(|entry| (Place::Label, entry));
    let annotations = annotations.iter().flatten();
    let annotations = annotations.map(|entry| (Place::Annotation, entry));
    let mut lines = labels
        .chain(annotations)
        .filter_map(|(place, (key, _))| complaint(place, key));
    let mut named: Vec<String> = lines.by_ref().take(NAMED).collect();
    let more = lines.count();
    if more > 0 {
        named.push(format!(
            "{more} more labels and annotations under {PREFIX} do nothing"
        ));
    }
    named
}

fn complaint(place: Place, key: &str) -> Option<String> {
    let name = key.strip_prefix(PREFIX)?;
    let is_read = READ.iter().find(|(known, _)| *known == key);
    if let Some((_, right)) = is_read {
        let wrong = *right != Place::Either && *right != place;
        return wrong.then(|| {
            let (given, right) = (place.name(), right.name());
            format!("{given} {key} does nothing: give it as {right}")
        });
    }
    if OF_OTHERS.contains(&name) {
        return None;
    }
    let known = READ.iter().filter_map(|(key, _)| key.strip_prefix(PREFIX));
    let hint = match closest(name, known) {
        Some(meant) => format!(": did you mean {PREFIX}{meant}?"),
        None => String::new(),
    };
    Some(format!(
        "{} {} is not known and does nothing{hint}",
        place.name(),
        excerpt(key)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(keys: impl IntoIterator<Item = impl Into<String>>) -> Map {
        let entries = keys.into_iter().map(|key| (key.into(), String::new()));
        Some(entries.collect())
    }

    #[test]
    fn keys_that_are_read_or_belong_to_others_are_right() {
        let labels = READ.iter().filter(|(_, at)| *at != Place::Annotation);
        let annotations = READ.iter().filter(|(_, at)| *at != Place::Label);
        let of_others = OF_OTHERS.map(|name| format!("{PREFIX}{name}"));
        assert_eq!(
            idle(
                &map(labels.map(|(key, _)| *key)),
                &map(annotations.map(|(key, _)| *key))
            ),
            Vec::<String>::new()
        );
        let elsewhere = [
            "adapter.model.aibrix.ai/enabled",
            "modelclaim.aibrix.ai/prot",
            "model.aibrix.ai",
            "app",
        ];
        assert_eq!(
            idle(&map(of_others.clone()), &map(elsewhere)),
            Vec::<String>::new()
        );
        assert_eq!(idle(&map(elsewhere), &map(of_others)), Vec::<String>::new());
        assert_eq!(idle(&None, &None), Vec::<String>::new());
    }

    #[test]
    fn a_misspelt_key_is_named_with_the_one_that_was_probably_meant() {
        let found = idle(
            &map(["model.aibrix.ai/prot", "model.aibrix.ai/Engine"]),
            &map(["model.aibrix.ai/cofnig", "model.aibrix.ai/routing-policy"]),
        );
        let expected = [
            "label model.aibrix.ai/Engine is not known and does nothing: did you mean \
             model.aibrix.ai/engine?",
            "label model.aibrix.ai/prot is not known and does nothing: did you mean \
             model.aibrix.ai/port?",
            "annotation model.aibrix.ai/cofnig is not known and does nothing: did you mean \
             model.aibrix.ai/config?",
            "annotation model.aibrix.ai/routing-policy is not known and does nothing",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_key_in_the_wrong_map_is_told_where_it_is_read() {
        let found = idle(
            &map([names::ANNOTATION_DRAIN]),
            &map([names::LABEL_PORT, names::LABEL_MODEL]),
        );
        let expected = [
            "label model.aibrix.ai/drain does nothing: give it as annotation",
            "annotation model.aibrix.ai/port does nothing: give it as label",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn of_many_keys_only_the_first_are_named() {
        let many = map((0..30).map(|n| format!("model.aibrix.ai/unknown{n:02}")));
        let found = idle(&many, &None);
        assert_eq!(found.len(), 9);
        assert_eq!(
            found[8],
            "22 more labels and annotations under model.aibrix.ai/ do nothing"
        );
    }
}
