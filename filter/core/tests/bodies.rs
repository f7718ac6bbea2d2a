//! Bodies of both legs against files: `bodies/<protocol>/<case>.json` is what the client sent,
//! `<case>.prefill.snap` and `<case>.decode.snap` what the engine is sent, byte for byte.
//!
//! A new case is listed below and starts with two empty snapshots.
//! `UPDATE_SNAPSHOTS=1 cargo test -p pd-core --test bodies` writes the files anew; read the diff.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

// Under wasm `#[test]` is the attribute of the runner under Node.
#[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
#[macro_use]
extern crate pd_core_wasm_tests;

use pd_core::engine::sglang::Meeting;
use pd_core::engine::trtllm::ContextWorker;
use pd_core::engine::{HandOver, KvReference, Legs};
use pd_core::request::patch::Lead;
use pd_core::request::{Endpoint, patch, scan};
use pd_core::testkit;
use pd_wire::knobs::KvConnector;

/// A reply of a vLLM 0.32 prefill engine, shortened.
const VLLM_REPLY: &[u8] = br#"{"id":"cmpl-1","choices":[{"index":0,"text":"x"}],"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[6, 7],[8]],"remote_engine_id":"4a2c","remote_request_id":"cmpl-1-0-9f5e","remote_host":"10.1.2.3","remote_port":15601,"tp_size":1,"remote_num_tokens":371,"remote_blocks_expiry_time":null},"metrics":null}"#;
/// A reply of a TensorRT-LLM 1.3.0rc8 context worker, shortened.
const TRT_REPLY: &[u8] = br#"{"id":"cmpl-1","choices":[{"index":0,"text":"x","disaggregated_params":{"request_type":"context_only","first_gen_tokens":[17],"first_gen_log_probs":null,"ctx_request_id":9223372036854775807,"encoded_opaque_state":"c3Rh\/dGU=","draft_tokens":null,"disagg_request_id":9223372036854775807,"ctx_dp_rank":0,"schedule_style":0}}],"prompt_token_ids":[101, 7592,102]}"#;
/// What a context worker says of itself.
const TRT_INFO: &[u8] =
    br#"{"disaggregated_params":{"ctx_dp_rank":0,"ctx_info_endpoint":["tcp:\/\/10.1.2.3:1\/a"]}}"#;
/// The largest id there is.
const ID: u64 = (1 << 63) - 1;

fn endpoint(case: &str) -> Endpoint {
    match case.split('_').next() {
        Some("chat") => Endpoint::Chat,
        Some("completions") => Endpoint::Completions,
        Some("responses") => Endpoint::Responses,
        Some("messages") => Endpoint::Messages,
        _ => panic!("{case} names no endpoint"),
    }
}

/// One case's files, as built in: a wasm module has no file system.
struct Case {
    protocol: &'static str,
    name: &'static str,
    body: &'static [u8],
    prefill: &'static [u8],
    decode: &'static [u8],
}

/// The legs of the protocol a folder is named after, and the prefill reply.
fn legs(protocol: &str) -> (Legs, &'static [u8]) {
    match protocol {
        "vllm" => (Legs::Vllm(KvConnector::Shfs), VLLM_REPLY),
        "sglang" => {
            let rid = "0b8d5a0e-7a7c-4f43-9c39-0d2f6b6f0d11";
            let meeting = Meeting::new("10.1.2.3", 8998, (1 << 53) - 1, rid);
            (Legs::Sglang(meeting), b"{}")
        }
        "trtllm" => (Legs::ContextFirst(ID), TRT_REPLY),
        "trtllm_generation_first" => (Legs::GenerationFirst(ID), TRT_REPLY),
        _ => panic!("no protocol {protocol}"),
    }
}

fn check(case: &Case) {
    let Case { name, body, .. } = *case;
    let endpoint = endpoint(name);
    let scanned = scan(endpoint, body).unwrap_or_else(|error| panic!("{name}: {error}"));
    let (legs, reply) = legs(case.protocol);
    let edits = legs.prefill_edits(endpoint, &scanned).unwrap();
    let prefill = patch::build(body, &scanned, &edits);
    let lead = Lead::of(body, &scanned).replacing(&scanned, legs.ids_member(endpoint));
    let prefill_pod = testkit::pod("ns/p").prefill().address("10.1.2.3:8000");
    let fleet = testkit::model("llama").pod(prefill_pod).fleet();
    let edit = match legs.hand_over(reply, fleet.pod(0)) {
        HandOver::Members(members) => {
            let prompt_ids = legs.prompt_ids(reply).map(<[u8]>::to_vec);
            let kv = KvReference {
                members,
                prompt_ids,
            };
            legs.decode_edit(&lead, endpoint, &kv)
        }
        HandOver::Nothing => {
            let worker = ContextWorker::read(TRT_INFO).unwrap();
            lead.edit(&legs.decode_members(Some(&worker)), None)
        }
        other => panic!("{other:?}"),
    };
    let decode = edit.apply(body);
    #[cfg(not(target_family = "wasm"))]
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        disk::write(case.protocol, &format!("{name}.prefill.snap"), &prefill);
        disk::write(case.protocol, &format!("{name}.decode.snap"), &decode);
        return;
    }
    for (leg, actual, expected) in [
        ("prefill", &prefill, case.prefill),
        ("decode", &decode, case.decode),
    ] {
        assert_eq!(
            String::from_utf8_lossy(actual),
            String::from_utf8_lossy(expected),
            "{name}.{leg}.snap"
        );
        let document = actual.strip_prefix(b"\xef\xbb\xbf").unwrap_or(actual);
        let value: serde_json::Value = serde_json::from_slice(document).unwrap();
        assert_eq!(value.get("model").unwrap(), "llama", "{name}.{leg}.snap");
    }
}

macro_rules! cases {
    ($($protocol:ident: $($case:ident),+;)+) => {
        $(
            mod $protocol {
                $(
                    #[test]
                    fn $case() {
                        super::check(&super::Case {
                            protocol: stringify!($protocol),
                            name: stringify!($case),
                            body: include_bytes!(concat!("bodies/", stringify!($protocol), "/", stringify!($case), ".json")),
                            prefill: include_bytes!(concat!("bodies/", stringify!($protocol), "/", stringify!($case), ".prefill.snap")),
                            decode: include_bytes!(concat!("bodies/", stringify!($protocol), "/", stringify!($case), ".decode.snap")),
                        });
                    }
                )+
            }
        )+

        /// Every case.
        #[cfg(not(target_family = "wasm"))]
        const CASES: &[(&str, &[&str])] = &[$((stringify!($protocol), &[$(stringify!($case)),+])),+];
    };
}

cases! {
    vllm:
        chat,
        chat_all_members,
        chat_big_numbers,
        chat_bom_and_space,
        chat_duplicates_elsewhere,
        chat_escaped_keys,
        chat_last_deleted,
        chat_tools,
        completions_text,
        completions_token_ids,
        messages,
        responses;
    sglang:
        chat,
        chat_all_members,
        chat_bom_and_space,
        chat_escaped_keys,
        chat_tools,
        completions_text,
        completions_token_ids;
    trtllm:
        chat,
        chat_all_members,
        chat_big_numbers,
        chat_bom_and_space,
        chat_token_ids,
        chat_tools,
        completions_escaped_keys,
        completions_text,
        completions_token_ids;
    trtllm_generation_first:
        chat,
        chat_all_members,
        chat_token_ids,
        completions_text,
        completions_token_ids;
}

/// What needs the files themselves.
#[cfg(not(target_family = "wasm"))]
mod disk {
    use super::CASES;
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bodies")
    }

    pub(super) fn write(protocol: &str, name: &str, content: &[u8]) {
        fs::write(folder().join(protocol).join(name), content).unwrap();
    }

    fn names(folder: &Path) -> BTreeSet<String> {
        fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn the_files_are_those_of_the_listed_cases() {
        let protocols: BTreeSet<String> =
            CASES.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(names(&folder()), protocols);
        for (protocol, cases) in CASES {
            let listed: BTreeSet<String> = cases
                .iter()
                .flat_map(|case| {
                    ["json", "prefill.snap", "decode.snap"].map(|kind| format!("{case}.{kind}"))
                })
                .collect();
            assert_eq!(names(&folder().join(protocol)), listed);
        }
    }
}
