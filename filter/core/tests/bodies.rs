//! Bodies of both legs against files: `bodies/<engine>/<case>.json` is what the client sent,
//! `<case>.prefill.snap` and `<case>.decode.snap` what the engine is sent, byte for byte.
//!
//! A new case is listed below and starts with two empty snapshots.
//! `UPDATE_SNAPSHOTS=1 cargo test -p pd-core --test bodies` writes the files anew; read the diff.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

// Under wasm `#[test]` is the attribute of the runner under Node.
#[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
#[macro_use]
extern crate pd_core_wasm_tests;

use pd_core::engine::vllm::{self, HandOver};
use pd_core::request::{Endpoint, patch, scan};
use pd_wire::knobs::KvConnector;

/// A reply of a vLLM 0.32 prefill engine, shortened.
const REPLY: &[u8] = br#"{"id":"cmpl-1","choices":[{"index":0,"text":"x"}],"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[6, 7],[8]],"remote_engine_id":"4a2c","remote_request_id":"cmpl-1-0-9f5e","remote_host":"10.1.2.3","remote_port":15601,"tp_size":1,"remote_num_tokens":371,"remote_blocks_expiry_time":null},"metrics":null}"#;

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
    name: &'static str,
    body: &'static [u8],
    prefill: &'static [u8],
    decode: &'static [u8],
}

fn check(case: &Case) {
    let Case { name, body, .. } = *case;
    let endpoint = endpoint(name);
    let scanned = scan(endpoint, body).unwrap_or_else(|error| panic!("{name}: {error}"));
    let edits = vllm::prefill_edits(endpoint, &scanned, KvConnector::Shfs).unwrap();
    let prefill = patch::build(body, &scanned, &edits);
    let HandOver::Members(members) = vllm::hand_over(REPLY, KvConnector::Shfs, "10.1.2.3") else {
        panic!("usable");
    };
    let prefix = patch::Lead::of(body, &scanned).with(&members);
    let mut decode = prefix.bytes;
    decode.extend_from_slice(body.get(prefix.replace..).unwrap());
    #[cfg(not(target_family = "wasm"))]
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        disk::write(&format!("{name}.prefill.snap"), &prefill);
        disk::write(&format!("{name}.decode.snap"), &decode);
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

macro_rules! vllm_cases {
    ($($case:ident,)+) => {
        $(
            #[test]
            fn $case() {
                check(&Case {
                    name: stringify!($case),
                    body: include_bytes!(concat!("bodies/vllm/", stringify!($case), ".json")),
                    prefill: include_bytes!(concat!("bodies/vllm/", stringify!($case), ".prefill.snap")),
                    decode: include_bytes!(concat!("bodies/vllm/", stringify!($case), ".decode.snap")),
                });
            }
        )+

        /// Every case.
        #[cfg(not(target_family = "wasm"))]
        const VLLM: &[&str] = &[$(stringify!($case)),+];
    };
}

vllm_cases! {
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
    responses,
}

/// What needs the files themselves.
#[cfg(not(target_family = "wasm"))]
mod disk {
    use super::VLLM;
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    fn folder() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bodies/vllm")
    }

    pub(super) fn write(name: &str, content: &[u8]) {
        fs::write(folder().join(name), content).unwrap();
    }

    #[test]
    fn the_files_are_those_of_the_listed_cases() {
        let files: BTreeSet<String> = fs::read_dir(folder())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let listed: BTreeSet<String> = VLLM
            .iter()
            .flat_map(|case| {
                ["json", "prefill.snap", "decode.snap"].map(|kind| format!("{case}.{kind}"))
            })
            .collect();
        assert_eq!(files, listed);
    }
}
