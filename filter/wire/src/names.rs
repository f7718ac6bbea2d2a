//! Labels, annotations, headers and Envoy names, each written once.
//!
//! Labels, annotations and client-visible headers are AIBrix's, so that a deployment moves over
//! without relabelling a pod.

/// Label (or annotation) that names the model a pod serves.
pub const LABEL_MODEL: &str = "model.aibrix.ai/name";
/// Label with the HTTP port of the engine; default 8000.
pub const LABEL_PORT: &str = "model.aibrix.ai/port";
/// Label with the engine kind: `vllm`, `sglang`, `trtllm`.
pub const LABEL_ENGINE: &str = "model.aibrix.ai/engine";
/// Label with the port of the metrics page; default: the model port.
pub const LABEL_METRIC_PORT: &str = "model.aibrix.ai/metric-port";
/// Label with the KV connector of a vLLM pod: `shfs`, `nixl`, `mooncake`.
pub const LABEL_KV_CONNECTOR: &str = "model.aibrix.ai/kv-connector-type";
/// Label with the phase a pod serves: `prefill`, `decode`, anything else is a standard pod.
pub const LABEL_ROLE: &str = "role-name";
/// Label that groups prefill and decode pods which may be paired.
pub const LABEL_ROLESET: &str = "roleset-name";
/// Label of a multi-node pod group; only index 0 (or no label) serves HTTP.
pub const LABEL_POD_GROUP_INDEX: &str = "stormservice.orchestration.aibrix.ai/pod-group-index";
/// Annotation with the model's routing profiles (JSON).
pub const ANNOTATION_CONFIG: &str = "model.aibrix.ai/config";
/// Annotation with the bootstrap port of an SGLang prefill pod; default 8998.
pub const ANNOTATION_BOOTSTRAP_PORT: &str = "model.aibrix.ai/sglang-bootstrap-port";
/// Annotation that takes a pod out of selection when `"true"`.
pub const ANNOTATION_DRAIN: &str = "model.aibrix.ai/drain";

/// Port of a pod that names none.
pub const DEFAULT_MODEL_PORT: u16 = 8000;
/// Bootstrap port of an SGLang prefill pod that names none.
pub const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

/// Request header with the `ip:port` the ORIGINAL_DST cluster connects to. Set by the filter
/// only; stripped from clients before the filter and from both legs before the engine.
pub const HEADER_TARGET: &str = "target-pod";
/// Request header that chooses a strategy; response header that names the one used.
pub const HEADER_STRATEGY: &str = "routing-strategy";
/// Request header that chooses a profile of the model's config.
pub const HEADER_PROFILE: &str = "config-profile";
/// Response header with the profile that `config-profile: auto` resolved to.
pub const HEADER_RESOLVED_PROFILE: &str = "x-aibrix-config-profile";
/// Request and response header with the id of a request.
pub const HEADER_REQUEST_ID: &str = "x-request-id";
/// Response header with the gateway's own id of the request.
pub const HEADER_GATEWAY_REQUEST_ID: &str = "request-id";
/// Response header with the name of the pod that answers.
pub const HEADER_TARGET_NAME: &str = "target-pod";
/// Response header with the address of the pod that answers.
pub const HEADER_TARGET_IP: &str = "target-pod-ip";
/// Response header with the name of the prefill pod.
pub const HEADER_PREFILL_NAME: &str = "prefill-target-pod";
/// Response header with the IP address of the prefill pod.
pub const HEADER_PREFILL_IP: &str = "prefill-target-pod-ip";
/// Marker of an error made because the prefill leg failed.
pub const HEADER_ERROR_PREFILL: &str = "x-error-pd-prefill";
/// Marker of an error made because the decode leg failed.
pub const HEADER_ERROR_DECODE: &str = "x-error-pd-decode";
/// Marker of an error made because no pod could be chosen.
pub const HEADER_ERROR_ROUTING: &str = "x-error-routing";
/// Marker of a request beyond the `requestsPerSecond` of its profile.
pub const HEADER_ERROR_RATE: &str = "x-error-model-rps-exceeded";
/// Marker of an error in the request body.
pub const HEADER_ERROR_BODY: &str = "x-error-request-body-processing";
/// Marker of a request for a model without pods.
pub const HEADER_ERROR_NO_BACKENDS: &str = "x-error-no-model-backends";
/// Request header with a Kubernetes label selector; only pods it matches may serve.
pub const HEADER_FILTER: &str = "external-filter";
/// Request header of a caller-owned session.
pub const HEADER_SESSION_KEY: &str = "x-aibrix-session-key";
/// Request and response header of a session the gateway named: the pod that answers it.
pub const HEADER_SESSION_ID: &str = "x-session-id";
/// Request header that asks for `x-pd-decision` on the response.
pub const HEADER_EXPLAIN: &str = "x-pd-explain";
/// Response header with the facts behind a choice.
pub const HEADER_DECISION: &str = "x-pd-decision";

/// The ORIGINAL_DST cluster that carries both legs.
pub const CLUSTER: &str = "pd_original_dst";
/// Filter-chain and route name by which the filter knows the control listener.
pub const CONTROL: &str = "pd-control";
/// Shared-data space: the `vm_id` of every configuration shipped.
pub const VM_ID: &str = "pd-router";

/// Control endpoint: PUT a [`crate::topology::Topology`] (JSON).
pub const PATH_TOPOLOGY: &str = "/pd/v1/topology";
/// Control endpoint: PUT [`crate::samples::Samples`] (binary).
pub const PATH_SAMPLES: &str = "/pd/v1/samples";
/// Control endpoint: GET [`crate::control::Ledgers`].
pub const PATH_LEDGERS: &str = "/pd/v1/ledgers";
/// Control endpoint: POST a request body, with the request's routing headers; answered with
/// [`crate::control::Explained`]. The path of another API than chat completions is appended.
pub const PATH_EXPLAIN: &str = "/pd/v1/explain";
/// Control endpoint: GET [`crate::control::Status`].
pub const PATH_STATUS: &str = "/pd/v1/status";
/// Control endpoint: PUT a [`crate::tokenizer::Message`].
pub const PATH_TOKENIZERS: &str = "/pd/v1/tokenizers";
