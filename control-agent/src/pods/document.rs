//! Text of a pods file → pods.
//!
//! Accepted: what `kubectl get pods -o json` or `-o yaml` prints, a `PodList`, a bare sequence
//! of pods, and YAML documents of any of these. Objects of another kind are passed over. One
//! pod that cannot be read is named and never hides the others; text that is no YAML at all is
//! refused whole, because a part of a file says nothing about the rest.

use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde_json::Value;

use super::settings::PodName;

/// Pods of a file and what could not be read.
#[derive(Debug, Default)]
pub struct Document {
    /// Pods with a name, in the order of the file; a repeated name is still in here twice.
    pub pods: Vec<(PodName, Pod)>,
    /// One line per pod or value that was left out or corrected.
    pub warnings: Vec<String>,
}

/// Why a file is refused whole; the pods known before stay.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// Neither JSON nor YAML.
    #[error("neither JSON nor YAML: {0}")]
    Syntax(String),
    /// Holds nothing; an empty list (`items: []`) says that there are no pods, an empty file is
    /// more likely one that is being written.
    #[error("the file is empty; write `items: []` for no pods")]
    Empty,
}

/// Reads the text of a pods file.
pub fn parse(text: &str) -> Result<Document, DocumentError> {
    let mut document = Document::default();
    let mut some = false;
    for value in values(text)? {
        if !value.is_null() {
            some = true;
            document.add(value, "");
        }
    }
    if some {
        Ok(document)
    } else {
        Err(DocumentError::Empty)
    }
}

fn values(text: &str) -> Result<Vec<Value>, DocumentError> {
    // JSON first: kubectl writes it, it is faster to read, and YAML forbids tabs in it.
    if text.trim_start().starts_with(['{', '['])
        && let Ok(value) = serde_json::from_str(text)
    {
        return Ok(vec![value]);
    }
    serde_norway::Deserializer::from_str(text)
        .map(Value::deserialize)
        .collect::<Result<_, _>>()
        .map_err(|error| DocumentError::Syntax(error.to_string()))
}

impl Document {
    fn add(&mut self, value: Value, place: &str) {
        match value {
            Value::Array(items) => self.add_items(items, place),
            Value::Object(mut object) => {
                let kind = object
                    .get("kind")
                    .and_then(Value::as_str)
                    .unwrap_or_default();
                if kind.ends_with("List") || (kind.is_empty() && object.contains_key("items")) {
                    match object.remove("items") {
                        Some(Value::Array(items)) => self.add_items(items, place),
                        None | Some(Value::Null) => {}
                        Some(_) => self.warn(place, "`items` is not a sequence"),
                    }
                } else if kind.is_empty() || kind == "Pod" {
                    self.add_pod(Value::Object(object), place);
                }
            }
            _ => self.warn(place, "neither a pod nor a list of pods"),
        }
    }

    fn add_items(&mut self, items: Vec<Value>, place: &str) {
        for (position, item) in items.into_iter().enumerate() {
            // A list inside a list is not a shape Kubernetes has; without this rule a file
            // could nest as deep as it likes.
            if item.is_array() {
                self.warn(place, "a list inside a list");
            } else {
                self.add_item(item, position);
            }
        }
    }

    fn add_item(&mut self, item: Value, position: usize) {
        let kind = item.get("kind").and_then(Value::as_str).unwrap_or("Pod");
        if kind == "Pod" {
            self.add_pod(item, &format!("item {position}"));
        }
    }

    fn add_pod(&mut self, mut value: Value, place: &str) {
        let place = match value.pointer("/metadata/name").and_then(Value::as_str) {
            Some(name) => format!("pod {name}"),
            None => place.to_owned(),
        };
        for key in self.quote_scalars(&mut value) {
            self.warn(
                &place,
                &format!("{key} is not a string; it is read as one, quote it"),
            );
        }
        match serde_json::from_value::<Pod>(value) {
            Ok(pod) => match PodName::of(&pod) {
                Some(name) => self.pods.push((name, pod)),
                None => self.warn(&place, "no metadata.name: left out"),
            },
            Err(error) => self.warn(&place, &format!("left out: {error}")),
        }
    }

    /// `port: 8000` written by hand is a number; Kubernetes itself would refuse the label.
    fn quote_scalars(&self, pod: &mut Value) -> Vec<String> {
        let mut quoted = Vec::new();
        for map in ["labels", "annotations"] {
            let Some(Value::Object(entries)) = pod.pointer_mut(&format!("/metadata/{map}")) else {
                continue;
            };
            for (key, value) in entries {
                if value.is_number() || value.is_boolean() {
                    *value = Value::String(value.to_string());
                    quoted.push(format!("metadata.{map}[{key}]"));
                }
            }
        }
        quoted
    }

    fn warn(&mut self, place: &str, text: &str) {
        let place = if place.is_empty() { "pods file" } else { place };
        self.warnings.push(format!("{place}: {text}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(document: &Document) -> Vec<String> {
        document
            .pods
            .iter()
            .map(|(name, _)| name.to_string())
            .collect()
    }

    #[test]
    fn every_accepted_shape_gives_the_same_pods() {
        let shapes = [
            r#"{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","namespace":"n"}},{"kind":"Pod","metadata":{"name":"b"}}]}"#,
            "\t{\n\t\"kind\": \"PodList\",\n\t\"items\": [{\"metadata\": {\"name\": \"a\", \"namespace\": \"n\"}}, {\"metadata\": {\"name\": \"b\"}}]\n\t}",
            "kind: List\nitems:\n- kind: Pod\n  metadata: {name: a, namespace: n}\n- metadata: {name: b}\n",
            "- metadata: {name: a, namespace: n}\n- metadata: {name: b}\n",
            "---\nkind: Pod\nmetadata: {name: a, namespace: n}\n---\n---\nkind: Service\nmetadata: {name: s}\n---\nmetadata: {name: b}\n",
            "items:\n- metadata: {name: a, namespace: n}\n- kind: Service\n  metadata: {name: s}\n- metadata: {name: b}\n",
        ];
        for shape in shapes {
            let document = parse(shape).unwrap();
            assert_eq!(names(&document), ["n/a", "default/b"], "{shape}");
            assert_eq!(document.warnings, Vec::<String>::new(), "{shape}");
        }
    }

    #[test]
    fn a_bad_pod_is_named_and_does_not_hide_the_others() {
        let document = parse(
            "items:\n- metadata: {name: bad, labels: [x]}\n- metadata: {labels: {}}\n- 7\n- [1]\n- metadata: {name: good}\n",
        )
        .unwrap();
        assert_eq!(names(&document), ["default/good"]);
        assert_eq!(document.warnings.len(), 4, "{:?}", document.warnings);
        assert!(
            document.warnings[0].starts_with("pod bad: left out: "),
            "{:?}",
            document.warnings
        );
        assert_eq!(document.warnings[1], "item 1: no metadata.name: left out");
        assert!(
            document.warnings[2].starts_with("item 2: left out"),
            "{:?}",
            document.warnings
        );
        assert_eq!(document.warnings[3], "pods file: a list inside a list");
    }

    #[test]
    fn an_unquoted_port_is_read_and_reported() {
        let document = parse("metadata: {name: a, labels: {model.aibrix.ai/port: 9000}}").unwrap();
        let labels = document.pods[0].1.metadata.labels.clone().unwrap();
        assert_eq!(labels["model.aibrix.ai/port"], "9000");
        assert_eq!(
            document.warnings,
            [
                "pod a: metadata.labels[model.aibrix.ai/port] is not a string; it is read as one, quote it"
            ]
        );
    }

    #[test]
    fn an_empty_list_is_no_pods_but_an_empty_file_is_a_mistake() {
        assert!(parse("items: []").unwrap().pods.is_empty());
        assert!(parse("[]").unwrap().pods.is_empty());
        assert!(matches!(parse(""), Err(DocumentError::Empty)));
        assert!(matches!(
            parse("---\n# nothing\n"),
            Err(DocumentError::Empty)
        ));
        assert!(matches!(
            parse("{\"items\": ["),
            Err(DocumentError::Syntax(_))
        ));
        assert!(matches!(parse("a: b: c"), Err(DocumentError::Syntax(_))));
    }
}
