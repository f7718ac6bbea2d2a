//! Whether the labels of a model's pods let any prefill and decode pod be paired.
//!
//! Labels only: whether a pod is ready, drains or has an address yet does not matter, so a warning
//! does not come and go with restarts.

use std::collections::{BTreeMap, BTreeSet};

use pd_wire::knobs::excerpt;
use pd_wire::names;
use pd_wire::topology::Role;

use crate::pods::settings::Reading;

/// Most rolesets and engines that one warning names.
const NAMED: usize = 4;

/// A prefill or decode pod, as far as its labels say whom it may be paired with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Half<'a> {
    namespace: &'a str,
    decodes: bool,
    roleset: Option<&'a str>,
    engine: &'a str,
}

impl<'a> Half<'a> {
    /// The model and the half; none of what is no prefill or decode pod.
    pub(super) fn of(namespace: &'a str, reading: &'a Reading) -> Option<(&'a str, Self)> {
        let (model, role, roleset, engine) = match reading {
            Reading::Serving { model, record } => {
                let pod = &record.pod;
                (model, pod.role, &pod.roleset, &pod.engine)
            }
            Reading::Unreachable { model, part } => (model, part.role, &part.roleset, &part.engine),
            Reading::Foreign | Reading::Worker { .. } => return None,
        };
        let half = Self {
            namespace,
            decodes: role == Role::Decode,
            roleset: roleset.as_deref(),
            engine,
        };
        (role != Role::Standard).then_some((model, half))
    }
}

/// Pods that may be paired with each other.
#[derive(Debug, Default)]
struct Roleset<'a> {
    prefill: bool,
    decode: bool,
    engines: BTreeSet<&'a str>,
}

/// What keeps the prefill and decode pods of a model from being paired.
pub(super) fn warnings(model: &str, halves: &[Half<'_>]) -> Vec<String> {
    if halves.is_empty() {
        return Vec::new();
    }
    let model = excerpt(model);
    let mut warnings = Vec::new();
    let mut rolesets: BTreeMap<(&str, &str), Roleset<'_>> = BTreeMap::new();
    for half in halves {
        let Some(name) = half.roleset else {
            continue;
        };
        let roleset = rolesets.entry((half.namespace, name)).or_default();
        roleset.engines.insert(half.engine);
        if half.decodes {
            roleset.decode = true;
        } else {
            roleset.prefill = true;
        }
    }
    let complete = || rolesets.values().filter(|set| set.prefill && set.decode);
    let engines: BTreeSet<&str> = complete().flat_map(|set| &set.engines).copied().collect();
    if complete().next().is_none() {
        let lacking = rolesets.iter().map(|((namespace, name), set)| {
            let lacks = if set.prefill { "decode" } else { "prefill" };
            format!("roleset {namespace}/{} has no {lacks} pod", excerpt(name))
        });
        let lacking = if rolesets.is_empty() {
            format!("none of these pods has a label {}", names::LABEL_ROLESET)
        } else {
            first(lacking)
        };
        warnings.push(format!(
            "model {model}: no request is split into prefill and decode: {lacking}; give a {} \
             prefill and a decode pod of one namespace the same {}",
            names::LABEL_ROLE,
            names::LABEL_ROLESET,
        ));
    }
    if engines.len() > 1 {
        warnings.push(format!(
            "model {model}: its prefill and decode pods are of several engines ({}), which cannot \
             be paired; give all the same {}",
            first(engines.iter().map(|engine| excerpt(engine))),
            names::LABEL_ENGINE,
        ));
    }
    warnings
}

/// The first of many, and how many more there are.
pub(super) fn first(items: impl Iterator<Item = String>) -> String {
    let mut items = items;
    let named: Vec<String> = items.by_ref().take(NAMED).collect();
    let named = named.join(", ");
    match items.count() {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn half<'a>(namespace: &'a str, phase: &str, roleset: &'a str) -> Half<'a> {
        Half {
            namespace,
            decodes: phase == "decode",
            roleset: Some(roleset),
            engine: "vllm",
        }
    }

    #[test]
    fn one_complete_roleset_is_enough() {
        assert_eq!(warnings("m", &[]), Vec::<String>::new());
        let halves = [
            half("n", "prefill", "a"),
            half("n", "decode", "a"),
            half("n", "prefill", "b"),
        ];
        assert_eq!(warnings("m", &halves), Vec::<String>::new());
    }

    #[test]
    fn each_roleset_is_named_with_what_it_lacks() {
        let fix =
            "give a role-name prefill and a decode pod of one namespace the same roleset-name";
        for (halves, lacking) in [
            (
                vec![half("n", "prefill", "a")],
                "roleset n/a has no decode pod",
            ),
            (
                vec![half("n", "decode", "b"), half("n", "prefill", "a")],
                "roleset n/a has no decode pod, roleset n/b has no prefill pod",
            ),
            (
                vec![half("n", "decode", ""), half("o", "prefill", "")],
                "roleset n/ has no prefill pod, roleset o/ has no decode pod",
            ),
            (
                vec![Half {
                    roleset: None,
                    ..half("n", "decode", "")
                }],
                "none of these pods has a label roleset-name",
            ),
        ] {
            let expected =
                format!("model m: no request is split into prefill and decode: {lacking}; {fix}");
            assert_eq!(warnings("m", &halves), [expected]);
        }
        let names: Vec<_> = (0..30).map(|n| format!("r{n:02}")).collect();
        let many: Vec<_> = names.iter().map(|name| half("n", "decode", name)).collect();
        let found = warnings("m", &many);
        assert_eq!(found.len(), 1);
        assert!(
            found[0].contains("r03 has no prefill pod and 26 more;"),
            "{found:?}"
        );
    }

    #[test]
    fn engines_that_differ_cannot_be_paired() {
        let mut halves = vec![
            half("n", "prefill", "a"),
            Half {
                engine: "sglang",
                ..half("n", "decode", "a")
            },
        ];
        assert_eq!(
            warnings("m", &halves),
            [
                "model m: its prefill and decode pods are of several engines (sglang, vllm), \
                 which cannot be paired; give all the same model.aibrix.ai/engine"
            ]
        );
        // A roleset that pairs nobody takes part in no pair.
        halves[1].roleset = Some("b");
        let found = warnings("m", &halves);
        assert_eq!(found.len(), 1);
        assert!(
            found[0].contains("roleset n/a has no decode pod"),
            "{found:?}"
        );
    }
}
