//! Records of all pods, by name, under the three changes a watch delivers.
//!
//! Pure: what went in last for a name is what counts. A recreated pod carries another UID and
//! so is another pod for everything built from the index.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;

use super::settings::{self, PodName, Reading, Source};

/// One pod as it was last seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// What it means for routing.
    pub reading: Reading,
    /// What is wrong with it.
    pub warnings: Vec<String>,
}

/// All pods of one source, ordered by namespace and name.
#[derive(Clone, Debug)]
pub struct Index {
    source: Source,
    entries: BTreeMap<PodName, Entry>,
}

impl Index {
    /// An empty index for pods of `source`.
    pub fn new(source: Source) -> Self {
        Self {
            source,
            entries: BTreeMap::new(),
        }
    }

    /// A pod appeared or changed.
    pub fn apply(&mut self, name: PodName, pod: &Pod) {
        let (reading, warnings) = settings::read(pod, &name, self.source);
        self.entries.insert(name, Entry { reading, warnings });
    }

    /// A pod is gone.
    pub fn delete(&mut self, name: &PodName) {
        self.entries.remove(name);
    }

    /// These are all pods; any other is gone. Of equal names the last one counts; the others
    /// are reported.
    pub fn reset<'a>(&mut self, pods: impl IntoIterator<Item = (&'a PodName, &'a Pod)>) {
        self.entries.clear();
        for (name, pod) in pods {
            let repeated = self.entries.contains_key(name);
            self.apply(name.clone(), pod);
            if repeated && let Some(entry) = self.entries.get_mut(name) {
                entry
                    .warnings
                    .push("named more than once: the last one counts".to_owned());
            }
        }
    }

    /// Pods in the order of their names.
    pub fn entries(&self) -> impl Iterator<Item = (&PodName, &Entry)> {
        self.entries.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, ip: &str) -> (PodName, Pod) {
        let yaml = format!(
            "metadata: {{name: {name}, labels: {{model.aibrix.ai/name: m}}}}\nstatus: {{podIP: {ip}}}"
        );
        super::super::document::parse(&yaml).unwrap().pods.remove(0)
    }

    fn addresses(index: &Index) -> Vec<String> {
        index
            .entries()
            .filter_map(|(_, entry)| match &entry.reading {
                Reading::Serving { record, .. } => Some(record.pod.address.clone()),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn apply_delete_and_reset_leave_what_was_seen_last() {
        let mut index = Index::new(Source::File);
        let (a, pod_a) = pod("a", "10.0.0.1");
        let (b, pod_b) = pod("b", "10.0.0.2");
        index.apply(b.clone(), &pod_b);
        index.apply(a.clone(), &pod_a);
        assert_eq!(addresses(&index), ["10.0.0.1:8000", "10.0.0.2:8000"]);
        let (_, moved) = pod("a", "10.0.0.9");
        index.apply(a.clone(), &moved);
        assert_eq!(addresses(&index), ["10.0.0.9:8000", "10.0.0.2:8000"]);
        index.delete(&a);
        assert_eq!(addresses(&index), ["10.0.0.2:8000"]);
        index.reset([(&a, &pod_a)]);
        assert_eq!(addresses(&index), ["10.0.0.1:8000"]);
    }

    #[test]
    fn of_two_pods_with_one_name_the_last_counts_and_is_reported() {
        let mut index = Index::new(Source::File);
        let (a, first) = pod("a", "10.0.0.1");
        let (_, second) = pod("a", "10.0.0.2");
        index.reset([(&a, &first), (&a, &second)]);
        assert_eq!(addresses(&index), ["10.0.0.2:8000"]);
        let (_, entry) = index.entries().next().unwrap();
        assert_eq!(
            entry.warnings,
            ["named more than once: the last one counts"]
        );
    }
}
