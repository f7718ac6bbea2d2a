use super::*;
use crate::pods::document;

/// A decode pod; `extra` lines are added under the markers `L` (labels), `A` (annotations),
/// `M` (metadata) and `S` (status).
fn pod(extra: &[(char, &str)]) -> Pod {
    let lines = |marker: char, indent: &str| -> String {
        let lines = extra.iter().filter(|(at, _)| *at == marker);
        lines.map(|(_, line)| format!("{indent}{line}\n")).collect()
    };
    let text = format!(
        "metadata:\n  name: p\n  namespace: ns\n{}  annotations:\n    x: y\n{}  labels:\n    \
         model.aibrix.ai/name: m\n    role-name: decode\n    roleset-name: r\n{}status:\n  \
         podIP: 10.0.0.1\n{}",
        lines('M', "  "),
        lines('A', "    "),
        lines('L', "    "),
        lines('S', "  "),
    );
    // A repeated key would be refused by YAML: the later line of the two counts.
    let mut kept: Vec<&str> = Vec::new();
    for line in text.lines() {
        let key = line.split(": ").next().unwrap_or_default();
        if key.starts_with("  ") {
            kept.retain(|known| known.split(": ").next() != Some(key));
        }
        kept.push(line);
    }
    document::parse(&kept.join("\n")).unwrap().pods.remove(0).1
}

fn read_from(pod: &Pod, source: Source) -> (Reading, Vec<String>) {
    read(pod, &PodName::of(pod).unwrap(), source)
}

fn record(pod: &Pod) -> (Record, Vec<String>) {
    match read_from(pod, Source::File) {
        (Reading::Serving { record, .. }, warnings) => (*record, warnings),
        (other, warnings) => panic!("{other:?} {warnings:?}"),
    }
}

#[test]
fn a_plain_pod_gets_the_defaults() {
    let pod = pod(&[]);
    let (reading, warnings) = read_from(&pod, Source::File);
    assert_eq!(warnings, Vec::<String>::new());
    let expected = Record {
        pod: topology::Pod {
            namespace: "ns".to_owned(),
            name: "p".to_owned(),
            uid: "ns/p/10.0.0.1".to_owned(),
            address: "10.0.0.1:8000".to_owned(),
            role: topology::Role::Decode,
            roleset: Some("r".to_owned()),
            engine: "vllm".to_owned(),
            kv_connector: None,
            bootstrap_port: None,
            restarts: 0,
            config: None,
            ready: true,
            draining: false,
            labels: pod.metadata.labels.clone().unwrap(),
        },
        config: None,
        metrics: "10.0.0.1:8000".parse().unwrap(),
    };
    assert_eq!(
        reading,
        Reading::Serving {
            model: "m".to_owned(),
            record: Box::new(expected)
        }
    );
}

#[test]
fn every_label_and_annotation_is_read() {
    let (record, warnings) = record(&pod(&[
        ('M', "uid: u-1"),
        ('L', "model.aibrix.ai/port: \"9000\""),
        ('L', "model.aibrix.ai/metric-port: \"9001\""),
        ('L', "model.aibrix.ai/engine: sglang"),
        ('L', "model.aibrix.ai/kv-connector-type: NIXL"),
        ('L', "role-name: prefill"),
        ('L', "roleset-name: \"\""),
        (
            'L',
            "stormservice.orchestration.aibrix.ai/pod-group-index: \"0\"",
        ),
        ('A', "model.aibrix.ai/sglang-bootstrap-port: \"8999\""),
        ('A', "model.aibrix.ai/drain: \"true\""),
        (
            'A',
            "model.aibrix.ai/config: '{\"profiles\": {\"default\": {\"requestsPerSecond\": 5}}}'",
        ),
        ('S', "podIP: \"fd00::1\""),
        (
            'S',
            "containerStatuses: [{name: a, image: i, imageID: i, ready: true, restartCount: 2}, \
             {name: b, image: i, imageID: i, ready: true, restartCount: 1}]",
        ),
    ]));
    assert_eq!(warnings, Vec::<String>::new());
    let read = &record.pod;
    assert_eq!(read.uid, "u-1");
    assert_eq!(read.address, "[fd00::1]:9000");
    assert_eq!(record.metrics.to_string(), "[fd00::1]:9001");
    assert_eq!(
        (read.engine.as_str(), read.kv_connector.as_deref()),
        ("sglang", Some("nixl"))
    );
    assert_eq!(read.role, topology::Role::Prefill);
    assert_eq!(
        read.roleset.as_deref(),
        Some(""),
        "an empty group name is a name"
    );
    assert_eq!(read.bootstrap_port, Some(8999));
    assert_eq!(read.restarts, 3);
    assert!(read.draining);
    let (_, config) = record.config.unwrap();
    assert_eq!(config.profiles["default"].requests_per_second, 5);
}

#[test]
fn the_metrics_port_follows_the_model_port() {
    let (record, _) = record(&pod(&[('L', "model.aibrix.ai/port: \"9000\"")]));
    assert_eq!(record.metrics.port(), 9000);
}

#[test]
fn a_bad_value_is_named_and_its_default_stands() {
    for bad in ["0", "65536", "-1", "http"] {
        let line = format!("model.aibrix.ai/port: \"{bad}\"");
        let (record, warnings) = record(&pod(&[('L', &line)]));
        assert_eq!(record.pod.address, "10.0.0.1:8000");
        let expected =
            format!("label model.aibrix.ai/port is {bad:?}, not a port from 1 to 65535: 8000");
        assert_eq!(warnings, [expected]);
    }
    let (bad, warnings) = record(&pod(&[
        ('A', "model.aibrix.ai/sglang-bootstrap-port: \"x\""),
        ('A', "model.aibrix.ai/drain: \"yes\""),
        ('A', "model.aibrix.ai/config: \"{\""),
    ]));
    assert_eq!(
        (bad.pod.bootstrap_port, bad.pod.draining, bad.config),
        (None, false, None)
    );
    let keys = ["sglang-bootstrap-port", "drain", "config"];
    assert_eq!(warnings.len(), keys.len(), "{warnings:?}");
    for key in keys {
        let start = format!("annotation model.aibrix.ai/{key}");
        assert!(
            warnings.iter().any(|warning| warning.starts_with(&start)),
            "{warnings:?}"
        );
    }
}

#[test]
fn the_model_name_may_be_an_annotation() {
    let mut pod = pod(&[]);
    pod.metadata
        .labels
        .as_mut()
        .unwrap()
        .insert(names::LABEL_MODEL.to_owned(), " ".to_owned());
    assert_eq!(
        read_from(&pod, Source::File),
        (Reading::Foreign, Vec::new())
    );
    let annotations = pod.metadata.annotations.as_mut().unwrap();
    annotations.insert(names::LABEL_MODEL.to_owned(), "org/model".to_owned());
    let (reading, _) = read_from(&pod, Source::File);
    assert!(matches!(reading, Reading::Serving { model, .. } if model == "org/model"));
}

#[test]
fn only_the_first_pod_of_a_group_serves() {
    for (index, warned) in [
        ("1", false),
        ("12", false),
        ("", true),
        ("-1", true),
        ("x", true),
    ] {
        let line = format!("stormservice.orchestration.aibrix.ai/pod-group-index: \"{index}\"");
        let (reading, warnings) = read_from(&pod(&[('L', &line)]), Source::Cluster);
        assert!(matches!(reading, Reading::Worker { .. }), "{index}");
        assert_eq!(!warnings.is_empty(), warned, "{index}: {warnings:?}");
    }
    let ray = pod(&[('L', "ray.io/node-type: worker")]);
    assert!(matches!(
        read_from(&ray, Source::File).0,
        Reading::Worker { .. }
    ));
}

#[test]
fn a_pod_without_a_usable_ip_is_left_out_but_its_model_is_known() {
    for ip in ["\"\"", "0.0.0.0", "\"::\"", "engine.local"] {
        let line = format!("podIP: {ip}");
        let (reading, warnings) = read_from(&pod(&[('S', &line)]), Source::File);
        assert_eq!(
            reading,
            Reading::Unreachable {
                model: "m".to_owned(),
                part: Part {
                    role: topology::Role::Decode,
                    roleset: Some("r".to_owned()),
                    engine: "vllm".to_owned(),
                }
            },
            "{ip}"
        );
        assert_eq!(warnings.len(), 1, "{ip}");
        assert!(warnings[0].contains("status.podIP"), "{warnings:?}");
    }
}

#[test]
fn readiness_is_the_ready_condition_unless_the_pod_is_being_deleted() {
    let ready = |extra: &[(char, &str)], source| match read_from(&pod(extra), source).0 {
        Reading::Serving { record, .. } => record.pod.ready,
        other => panic!("{other:?}"),
    };
    let yes = (
        'S',
        "conditions: [{type: Initialized, status: \"False\"}, {type: Ready, status: \"True\"}]",
    );
    let no = ('S', "conditions: [{type: Ready, status: \"False\"}]");
    let none = ('S', "conditions: []");
    let deleted = ('M', "deletionTimestamp: \"2026-01-01T00:00:00Z\"");
    for source in [Source::File, Source::Cluster] {
        assert!(ready(&[yes], source));
        assert!(!ready(&[no], source));
        assert!(!ready(&[none], source));
        assert!(!ready(&[yes, deleted], source));
    }
    assert!(ready(&[], Source::File));
    assert!(!ready(&[], Source::Cluster));
}

#[test]
fn a_pod_without_a_roleset_is_reported_if_its_role_needs_one() {
    let mut lonely = pod(&[]);
    lonely
        .metadata
        .labels
        .as_mut()
        .unwrap()
        .remove("roleset-name");
    let (record, warnings) = record(&lonely);
    assert_eq!(record.pod.roleset, None);
    assert_eq!(
        warnings,
        ["no label roleset-name: the pod takes no part in prefill/decode routing"]
    );
}

#[test]
fn labels_are_pushed_as_they_are_up_to_a_bound() {
    let mut pod = pod(&[('L', "zone: b"), ('L', "empty: \"\"")]);
    let (read, warnings) = record(&pod);
    assert_eq!(read.pod.labels["zone"], "b");
    assert_eq!(read.pod.labels["empty"], "");
    assert_eq!(warnings, Vec::<String>::new());

    let labels = pod.metadata.labels.get_or_insert_default();
    let before = labels.len();
    for n in 0..60 {
        labels.insert(format!("x{n:02}"), "v".repeat(97));
    }
    let (read, warnings) = record(&pod);
    let bytes: usize = read
        .pod
        .labels
        .iter()
        .map(|(key, value)| key.len() + value.len())
        .sum();
    assert!((3900..=topology::MAX_LABELS).contains(&bytes), "{bytes}");
    let left_out = before + 60 - read.pod.labels.len();
    let expected = format!("labels of more than 4096 bytes: {left_out} of 65 are left out");
    assert!(warnings[0].starts_with(&expected), "{warnings:?}");
    assert!(read.pod.labels.contains_key("x00") && !read.pod.labels.contains_key("zone"));
}

#[test]
fn a_role_that_is_none_is_reported_unless_it_is_called_a_standard_one() {
    let warned = |role: &str, extra: &[(char, &str)]| {
        let line = format!("role-name: \"{role}\"");
        let mut lines = vec![('L', line.as_str())];
        lines.extend(extra);
        let (record, warnings) = record(&pod(&lines));
        assert_eq!(record.pod.role, topology::Role::Standard, "{role}");
        warnings
    };
    let said = |role: &str, fix: &str| {
        format!(
            "label role-name is {role:?}, neither \"prefill\" nor \"decode\": the pod counts as a \
             standard one; {fix}"
        )
    };
    let prefill = "did you mean prefill?";
    assert_eq!(warned("prefil", &[]), [said("prefil", prefill)]);
    assert_eq!(warned("Prefill", &[]), [said("Prefill", prefill)]);
    assert_eq!(
        warned("decoder", &[]),
        [said("decoder", "did you mean decode?")]
    );
    let all = "if that is meant, call it \"all\" or leave the label out";
    assert_eq!(warned("server", &[]), [said("server", all)]);
    for role in ["all", "combined", "standard", ""] {
        assert_eq!(warned(role, &[]), Vec::<String>::new(), "{role}");
    }
    let profile = |combined: bool| {
        format!(
            "model.aibrix.ai/config: '{{\"profiles\": {{\"default\": {{\"routingConfig\": \
             {{\"combined\": {combined}}}}}}}}}'"
        )
    };
    let none: [String; 0] = [];
    assert_eq!(warned("server", &[('A', &profile(true))]), none);
    assert_eq!(
        warned("server", &[('A', &profile(false))]),
        [said("server", all)]
    );
}

#[test]
fn a_misspelt_key_is_reported_even_if_it_hides_the_model() {
    let (mut read, warnings) = record(&pod(&[('L', "model.aibrix.ai/prot: \"9000\"")]));
    let said = |key: &str, meant: &str| {
        format!(
            "label model.aibrix.ai/{key} is not known and does nothing: did you mean \
             model.aibrix.ai/{meant}?"
        )
    };
    assert_eq!(warnings, [said("prot", "port")]);
    assert_eq!(
        read.pod.labels.remove("model.aibrix.ai/prot").unwrap(),
        "9000"
    );

    let mut nameless = pod(&[]);
    let labels = nameless.metadata.labels.get_or_insert_default();
    let model = labels.remove(names::LABEL_MODEL).unwrap();
    labels.insert("model.aibrix.ai/nmae".to_owned(), model);
    assert_eq!(
        read_from(&nameless, Source::File),
        (Reading::Foreign, vec![said("nmae", "name")])
    );
}
