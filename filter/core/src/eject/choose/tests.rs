//! Who is chosen while somebody is ejected.

use super::*;
use crate::eject::Entry;
use crate::fleet::ModelFleet;
use crate::ledger::{Amounts, PodKey};
use crate::select::{Settings, Shape, Strategy};
use crate::testkit::{ModelBuilder, model, pod};

fn key(fleet: &ModelFleet, name: &str) -> PodKey {
    let found = fleet.pods.iter().find(|pod| pod.name == name);
    found.expect("the fleet has it").key
}

fn subject(fleet: &ModelFleet, name: &str) -> Subject {
    match name.split_once('+') {
        Some((prefill, decode)) => Subject::Pair(key(fleet, prefill), key(fleet, decode)),
        None => Subject::Pod(key(fleet, name)),
    }
}

/// A question: who is ejected until 1000, and what is asked when.
struct Case<'a> {
    fleet: &'a ModelFleet,
    ejected: &'a [&'a str],
    now_ms: u64,
    shape: Shape,
    may_try: bool,
    /// Pods with ten requests.
    busy: &'a [&'a str],
    refused: &'a [&'a str],
    max_decode_per_pod: u32,
}

impl<'a> Case<'a> {
    fn new(fleet: &'a ModelFleet, ejected: &'a [&'a str]) -> Self {
        Self {
            fleet,
            ejected,
            now_ms: 999,
            shape: Shape::Pair,
            may_try: true,
            busy: &[],
            refused: &[],
            max_decode_per_pod: 0,
        }
    }

    /// The pods chosen, and whose trial that is; the text of a refusal.
    fn ask(&self) -> (String, Vec<Subject>) {
        let fleet = self.fleet;
        let entries: Vec<Entry> = self
            .ejected
            .iter()
            .map(|name| Entry {
                ejected: true,
                until_ms: 1000,
                ..Entry::new(subject(fleet, name))
            })
            .collect();
        let view = View::of(fleet, &entries, 50, self.now_ms);
        let loads: Vec<Amounts> = fleet
            .pods
            .iter()
            .map(|pod| {
                let requests = if self.busy.contains(&pod.name.as_str()) {
                    10
                } else {
                    0
                };
                Amounts {
                    prefill_requests: requests,
                    decode_running: requests,
                    ..Amounts::default()
                }
            })
            .collect();
        let settings = Settings {
            ties_by_pod_id: true,
            max_decode_per_pod: self.max_decode_per_pod,
            ..Settings::default()
        };
        let allowed = |at: u16| {
            let pod = fleet.pod(at).expect("a pod of the fleet");
            !self.refused.contains(&pod.name.as_str())
        };
        let query = Query {
            fleet,
            loads: &loads,
            settings: &settings,
            profile: None,
            now_ms: self.now_ms,
            prompt_tokens: 1,
            text_bytes: 1,
            match_percent: &[],
            allowed: &allowed,
            excluded_rolesets: &[],
            blocked_pairs: &[],
            banded_roleset: None,
            tie: 7,
            shape: self.shape,
            listed: 0,
        };
        let name = |at: u16| fleet.pod(at).expect("a pod of the fleet").name.clone();
        match choose(&query, view.as_ref(), self.may_try) {
            Ok((decision, trials)) => {
                let chosen = match decision.target {
                    Target::Pair(pair) => format!("{}+{}", name(pair.prefill), name(pair.decode)),
                    Target::Combined(pod) | Target::OneLeg(pod) => name(pod),
                };
                (chosen, trials)
            }
            Err(refusal) => (refusal.to_string(), Vec::new()),
        }
    }

    fn chosen(&self) -> String {
        self.ask().0
    }
}

fn pairs(n: usize) -> ModelBuilder {
    (0..n).fold(model("m"), |it, n| it.pair(&format!("r{n}")))
}

#[test]
fn the_ejected_are_avoided_and_their_trial_is_not_left_to_chance() {
    let fleet = pairs(2).fleet();
    for (out, also) in [("r0-p", "r0-p"), ("r0-d", "r0-d"), ("r0-p+r0-d", "r0-p")] {
        let ejected = [out];
        let mut case = Case::new(&fleet, &ejected);
        assert_eq!(case.chosen(), "r1-p+r1-d", "{out}");
        case.now_ms = 1000;
        // Anybody else would be the better choice.
        case.busy = &["r0-p", "r0-d"];
        let trial = ("r0-p+r0-d".to_owned(), vec![subject(&fleet, out)]);
        assert_eq!(case.ask(), trial);
        // A retry is not put at risk, and a pod that cannot take the request is no trial.
        case.may_try = false;
        assert_eq!(case.ask(), ("r1-p+r1-d".to_owned(), Vec::new()));
        case.may_try = true;
        case.refused = std::slice::from_ref(&also);
        assert_eq!(case.ask(), ("r1-p+r1-d".to_owned(), Vec::new()));
    }
}

#[test]
fn a_trial_is_a_whole_pair_even_when_both_are_due() {
    let fleet = pairs(4).fleet();
    let mut case = Case::new(&fleet, &["r0-p", "r0-d"]);
    case.now_ms = 1000;
    let (chosen, mut trials) = case.ask();
    trials.sort_unstable();
    let mut both = ["r0-p", "r0-d"].map(|name| subject(&fleet, name));
    both.sort_unstable();
    assert_eq!(
        (chosen.as_str(), trials.as_slice()),
        ("r0-p+r0-d", &both[..])
    );
}

#[test]
fn who_serves_alone_is_tried_by_a_request_for_one_pod() {
    let fleet = pairs(1).pod(pod("s0")).pod(pod("s1")).fleet();
    let mut case = Case::new(&fleet, &["s0"]);
    case.shape = Shape::Plain(Strategy::LeastRequest);
    assert_eq!(case.chosen(), "s1");
    case.now_ms = 1000;
    case.busy = &["s0"];
    assert_eq!(case.ask(), ("s0".to_owned(), vec![subject(&fleet, "s0")]));
    case.shape = Shape::Pair;
    assert_eq!(case.ask(), ("r0-p+r0-d".to_owned(), Vec::new()));

    let fleet = pairs(2).fleet();
    let mut case = Case::new(&fleet, &["r0-d"]);
    case.now_ms = 1000;
    case.busy = &["r0-d"];
    case.shape = Shape::OneLeg;
    assert_eq!(
        case.ask(),
        ("r0-d".to_owned(), vec![subject(&fleet, "r0-d")])
    );
    let ejected = ["r0-p"];
    case.ejected = &ejected;
    assert_eq!(case.chosen(), "r1-d", "a prefill pod has no part in it");
}

#[test]
fn an_ejection_alone_turns_nobody_away() {
    let fleet = pairs(2).fleet();
    for out in ["r0-p", "r0-d", "r0-p+r0-d"] {
        let ejected = [out];
        let mut case = Case::new(&fleet, &ejected);
        // The request may use this roleset only.
        case.refused = &["r1-p"];
        assert_eq!(case.chosen(), "r0-p+r0-d");
        case.refused = &["r0-p", "r1-p"];
        assert!(case.chosen().starts_with("prefill pods are not ready"));
    }
    let lone = pairs(1).fleet();
    for out in ["r0-p", "r0-d", "r0-p+r0-d"] {
        assert_eq!(Case::new(&lone, &[out]).chosen(), "r0-p+r0-d");
    }
}

#[test]
fn full_pods_are_no_reason_to_try_the_ejected() {
    let fleet = pairs(2).fleet();
    let mut case = Case::new(&fleet, &["r0-p"]);
    case.busy = &["r1-d"];
    case.max_decode_per_pod = 10;
    assert!(case.chosen().contains("at capacity"));
    case.now_ms = 1000;
    assert_eq!(case.chosen(), "r0-p+r0-d", "its trial is");
}
