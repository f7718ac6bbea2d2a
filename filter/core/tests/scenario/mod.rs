//! A fleet, its load and a request, written as JSON: input of the vectors and the properties.

use pd_core::fleet::{FleetPod, ModelFleet, Roleset};
use pd_core::ledger::{Amounts, PodKey};
use pd_core::select::{
    Decision, LISTED, Query, Refusal, Scored, Settings, Shape, Strategy, Target, select,
};
use pd_wire::knobs::{Choice, DecodePolicy, PrefillFallback, PrefillPolicy};
use pd_wire::profile::{ModelConfig, Profile};
use pd_wire::samples::PodSample;
use pd_wire::topology::Role;
use serde::{Deserialize, Deserializer};
use std::collections::BTreeMap;

/// Time of every choice, in ms of the shared clock.
pub(crate) const NOW_MS: u64 = 1_000_000;

/// One fleet with one request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Scenario {
    /// Settings that differ from the defaults.
    pub(crate) settings: Overrides,
    /// Prompt length in tokens.
    pub(crate) prompt_tokens: u64,
    /// Prompt length in bytes of text.
    pub(crate) text_bytes: u64,
    /// What the request needs.
    #[serde(deserialize_with = "shape")]
    pub(crate) shape: Option<Shape>,
    /// Profile of the request.
    pub(crate) profile: Option<String>,
    /// Pods in any order.
    pub(crate) pods: Vec<PodSpec>,
    /// Rolesets already tried.
    pub(crate) excluded: Vec<String>,
    /// Pods the request may not use.
    pub(crate) disallowed: Vec<String>,
    /// Pairs ejected together.
    pub(crate) blocked: Vec<(String, String)>,
    /// Roleset that the prompt's length is banded to; one that is not in the fleet is none.
    pub(crate) banded: Option<String>,
    /// Random word.
    pub(crate) tie: u64,
}

/// Settings that differ from the defaults.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct Overrides {
    #[serde(deserialize_with = "choice")]
    pub(crate) prefill_policy: Option<PrefillPolicy>,
    #[serde(deserialize_with = "choice")]
    pub(crate) decode_policy: Option<DecodePolicy>,
    #[serde(deserialize_with = "choice")]
    pub(crate) prefill_fallback: Option<PrefillFallback>,
    pub(crate) bucketing: Option<bool>,
    pub(crate) local_prefill_max_tokens: Option<u64>,
    pub(crate) max_prefill_per_pod: Option<u32>,
    pub(crate) max_decode_per_pod: Option<u32>,
    pub(crate) kv_weight: Option<f64>,
    pub(crate) hybrid_factor: Option<f64>,
    pub(crate) output_growth: Option<bool>,
    pub(crate) std_factor: Option<f64>,
    pub(crate) prefill_spread: Option<f64>,
    pub(crate) decode_spread: Option<f64>,
    pub(crate) throughput_spread: Option<f64>,
    pub(crate) drain_ratio: Option<f64>,
    pub(crate) min_match_pct: Option<f64>,
    pub(crate) weight_running: Option<f64>,
    pub(crate) weight_throughput: Option<f64>,
    pub(crate) ties_by_pod_id: Option<bool>,
}

/// One pod with its load.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(crate) struct PodSpec {
    pub(crate) name: String,
    /// `prefill`, `decode`; anything else is a standard pod.
    pub(crate) role: String,
    pub(crate) roleset: String,
    pub(crate) unusable: bool,
    /// Outstanding prefill requests.
    pub(crate) requests: u32,
    /// Prefix match, percent.
    pub(crate) matched: u8,
    /// Decode requests sent.
    pub(crate) running: u32,
    /// Decode requests not sent yet.
    pub(crate) pending: u32,
    /// Age of the sample in ms; without one the pod has no sample.
    pub(crate) sample_age: Option<u64>,
    #[serde(deserialize_with = "number")]
    pub(crate) sampled_running: Option<f64>,
    #[serde(deserialize_with = "number")]
    pub(crate) remote_running: Option<f64>,
    #[serde(deserialize_with = "number")]
    pub(crate) throughput: Option<f64>,
    #[serde(deserialize_with = "number")]
    pub(crate) kv_usage: Option<f64>,
    #[serde(deserialize_with = "number")]
    pub(crate) drain_rate: Option<f64>,
    #[serde(deserialize_with = "number")]
    pub(crate) waiting: Option<f64>,
    #[serde(deserialize_with = "number")]
    pub(crate) prefill_ms: Option<f64>,
    pub(crate) active_tokens: u64,
    pub(crate) kv_tokens: u64,
    pub(crate) decode_tokens: u64,
    #[serde(deserialize_with = "number")]
    pub(crate) remote_decode_tokens: Option<f64>,
    /// Age of each of its decode requests.
    pub(crate) routed_ago_ms: u64,
    /// It has no config annotation.
    pub(crate) unannotated: bool,
    /// Its profile takes overflow.
    pub(crate) combined: bool,
    pub(crate) prompt_min: u64,
    pub(crate) prompt_max: Option<u64>,
    /// Name of that profile; the default one without.
    pub(crate) profile: Option<String>,
}

/// What came of it, by pod name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// `prefill+decode`, `combined:pod`, `one-leg:pod` or the refusal's name.
    pub(crate) target: String,
    pub(crate) prefill: BTreeMap<String, f64>,
    pub(crate) decode: BTreeMap<String, f64>,
    pub(crate) result: Result<Decision, Refusal>,
}

impl Scenario {
    /// The settings in force.
    pub(crate) fn settings(&self) -> Settings {
        let mut settings = Settings::default();
        let given = &self.settings;
        set(&mut settings.prefill_policy, given.prefill_policy);
        set(&mut settings.decode_policy, given.decode_policy);
        set(&mut settings.prefill_fallback, given.prefill_fallback);
        set(&mut settings.bucketing, given.bucketing);
        set(
            &mut settings.local_prefill_max_tokens,
            given.local_prefill_max_tokens,
        );
        set(&mut settings.max_prefill_per_pod, given.max_prefill_per_pod);
        set(&mut settings.max_decode_per_pod, given.max_decode_per_pod);
        set(&mut settings.kv_weight, given.kv_weight);
        set(&mut settings.hybrid_factor, given.hybrid_factor);
        set(&mut settings.output_growth, given.output_growth);
        set(&mut settings.std_factor, given.std_factor);
        set(&mut settings.prefill_spread, given.prefill_spread);
        set(&mut settings.decode_spread, given.decode_spread);
        set(&mut settings.throughput_spread, given.throughput_spread);
        set(&mut settings.drain_ratio, given.drain_ratio);
        set(&mut settings.min_match_pct, given.min_match_pct);
        set(&mut settings.weight_running, given.weight_running);
        set(&mut settings.weight_throughput, given.weight_throughput);
        set(&mut settings.ties_by_pod_id, given.ties_by_pod_id);
        settings
    }

    /// Pods in the order given; rolesets in the order of their first pod.
    pub(crate) fn fleet(&self) -> ModelFleet {
        let mut rolesets: Vec<Roleset> = Vec::new();
        for (ordinal, pod) in (0_u16..).zip(&self.pods) {
            if pod.unusable || pod.roleset.is_empty() {
                continue;
            }
            let at = rolesets
                .iter()
                .position(|r| r.name == pod.roleset)
                .unwrap_or_else(|| {
                    rolesets.push(Roleset {
                        namespace: "ns".into(),
                        name: pod.roleset.clone(),
                        prefill: Vec::new(),
                        decode: Vec::new(),
                    });
                    rolesets.len() - 1
                });
            match pod.role.as_str() {
                "prefill" => rolesets[at].prefill.push(ordinal),
                "decode" => rolesets[at].decode.push(ordinal),
                _ => {}
            }
        }
        rolesets.retain(|roleset| !roleset.prefill.is_empty() && !roleset.decode.is_empty());
        ModelFleet {
            name: "m".into(),
            slot: 0,
            pods: (0..)
                .zip(&self.pods)
                .map(|(at, pod)| pod.fleet_pod(at))
                .collect(),
            rolesets: rolesets.into(),
            configs: self.pods.iter().map(PodSpec::config).collect(),
            config: None,
            samples: self.pods.iter().map(PodSpec::sample).collect(),
        }
    }

    /// Chooses.
    pub(crate) fn run(&self) -> Outcome {
        let (fleet, settings) = (self.fleet(), self.settings());
        let loads: Vec<Amounts> = self.pods.iter().map(PodSpec::amounts).collect();
        let matched: Vec<u8> = self.pods.iter().map(|pod| pod.matched).collect();
        let ordinal = |name: &String| {
            let at = self.pods.iter().position(|pod| pod.name == *name);
            u16::try_from(at.expect("the scenario names a pod it has")).unwrap()
        };
        let disallowed: Vec<u16> = self.disallowed.iter().map(ordinal).collect();
        let blocked: Vec<(u16, u16)> = self
            .blocked
            .iter()
            .map(|(p, d)| (ordinal(p), ordinal(d)))
            .collect();
        let excluded: Vec<u16> = (0_u16..)
            .zip(fleet.rolesets.iter())
            .filter(|(_, roleset)| self.excluded.contains(&roleset.name))
            .map(|(at, _)| at)
            .collect();
        let result = select(&Query {
            fleet: &fleet,
            loads: &loads,
            settings: &settings,
            profile: self.profile.as_deref(),
            now_ms: NOW_MS,
            prompt_tokens: self.prompt_tokens,
            text_bytes: self.text_bytes,
            match_percent: &matched,
            allowed: &|pod| !disallowed.contains(&pod),
            excluded_rolesets: &excluded,
            blocked_pairs: &blocked,
            banded_roleset: self
                .banded
                .as_ref()
                .and_then(|name| {
                    (0..)
                        .zip(fleet.rolesets.iter())
                        .find(|(_, it)| it.name == *name)
                })
                .map(|(at, _)| at),
            tie: self.tie,
            shape: self.shape.unwrap_or(Shape::Pair),
            listed: LISTED,
        });
        let name = |pod: u16| self.pods[usize::from(pod)].name.clone();
        let scores = |scored: &[Scored]| -> BTreeMap<String, f64> {
            scored
                .iter()
                .map(|scored| (name(scored.pod), scored.score))
                .collect()
        };
        let explanation = result.as_ref().map(|decision| &decision.explanation);
        Outcome {
            target: match &result {
                Ok(Decision {
                    target: Target::Pair(pair),
                    ..
                }) => {
                    format!("{}+{}", name(pair.prefill), name(pair.decode))
                }
                Ok(Decision {
                    target: Target::Combined(pod),
                    ..
                }) => {
                    format!("combined:{}", name(*pod))
                }
                Ok(Decision {
                    target: Target::OneLeg(pod),
                    ..
                }) => {
                    format!("one-leg:{}", name(*pod))
                }
                Err(refusal) => {
                    let text = format!("{refusal:?}");
                    text.split(' ').next().unwrap_or_default().to_owned()
                }
            },
            prefill: explanation
                .map(|facts| scores(&facts.prefill))
                .unwrap_or_default(),
            decode: explanation
                .map(|facts| scores(&facts.decode))
                .unwrap_or_default(),
            result,
        }
    }
}

impl PodSpec {
    fn fleet_pod(&self, config: u32) -> FleetPod {
        FleetPod {
            key: PodKey(name_hash(&self.name)),
            namespace: "ns".into(),
            name: self.name.clone(),
            address: "127.0.0.1:8000".into(),
            role: match self.role.as_str() {
                "prefill" => Role::Prefill,
                "decode" => Role::Decode,
                _ => Role::Standard,
            },
            engine: "vllm".into(),
            kv_connector: None,
            bootstrap_port: None,
            restarts: 0,
            config: (!self.unannotated).then_some(config),
            usable: !self.unusable,
            labels: Vec::new(),
        }
    }

    fn sample(&self) -> Option<(PodSample, u64)> {
        let sample = PodSample {
            running: self.sampled_running,
            remote_running: self.remote_running,
            generation_throughput: self.throughput,
            kv_usage: self.kv_usage,
            drain_rate: self.drain_rate,
            waiting: self.waiting,
            prefill_ms: self.prefill_ms,
            remote_decode_tokens: self.remote_decode_tokens,
            ..PodSample::default()
        };
        self.sample_age.map(|age| (sample, NOW_MS - age))
    }

    fn amounts(&self) -> Amounts {
        Amounts {
            prefill_requests: self.requests,
            decode_pending: self.pending,
            decode_running: self.running,
            active_tokens: self.active_tokens,
            kv_tokens: self.kv_tokens,
            decode_tokens: self.decode_tokens,
            routed_at_sum_ms: (u64::from(self.pending) + u64::from(self.running))
                * (NOW_MS - self.routed_ago_ms),
        }
    }

    fn config(&self) -> ModelConfig {
        let profile = Profile {
            combined: self.combined,
            prompt_min: self.prompt_min,
            prompt_max: self.prompt_max,
            ..Profile::default()
        };
        let name = self.profile.clone().unwrap_or_else(|| "default".into());
        ModelConfig {
            profiles: BTreeMap::from([(name, profile)]),
            ..ModelConfig::default()
        }
    }
}

/// A number, or the name of one that JSON cannot write: `NaN`, `inf`, `-inf`, `max`.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Number {
        Plain(f64),
        Named(String),
    }
    match Number::deserialize(from)? {
        Number::Plain(value) => Ok(Some(value)),
        Number::Named(name) if name == "max" => Ok(Some(f64::MAX)),
        Number::Named(name) => name.parse().map(Some).map_err(serde::de::Error::custom),
    }
}

/// A setting by its name.
fn choice<'de, C: Choice, D: Deserializer<'de>>(from: D) -> Result<Option<C>, D::Error> {
    let name = String::deserialize(from)?;
    C::from_name(&name)
        .map(Some)
        .ok_or_else(|| serde::de::Error::custom(name))
}

/// `pair`, `one-leg`, a strategy, or `session:<pod ordinal>` and `key:<number>`.
fn shape<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Shape>, D::Error> {
    let text = String::deserialize(from)?;
    let strategy = match text.as_str() {
        "pair" => return Ok(Some(Shape::Pair)),
        "one-leg" => return Ok(Some(Shape::OneLeg)),
        "random" => Strategy::Random,
        "least-request" => Strategy::LeastRequest,
        "prefix-cache" => Strategy::PrefixCache,
        _ => match text.split_once(':') {
            Some(("session", pod)) => Strategy::Affinity {
                pod: pod.parse().ok(),
                key: None,
            },
            Some(("key", key)) => Strategy::Affinity {
                pod: None,
                key: key.parse().ok(),
            },
            _ => return Err(serde::de::Error::custom(text)),
        },
    };
    Ok(Some(Shape::Plain(strategy)))
}

fn set<T>(field: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *field = value;
    }
}

/// FNV-1a: gives pods with different names different keys.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
