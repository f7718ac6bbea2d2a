//! Bodies of both legs against files: `bodies/<engine>/<case>.json` is what the client sent,
//! `<case>.prefill.snap` and `<case>.decode.snap` what the engine is sent, byte for byte.
//!
//! `UPDATE_SNAPSHOTS=1 cargo test -p pd-core --test bodies` writes the files anew; read the diff.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

use pd_core::engine::vllm::{self, HandOver};
use pd_core::request::{Endpoint, patch, scan};
use pd_wire::knobs::KvConnector;
use std::fs;
use std::path::{Path, PathBuf};

/// A reply of a vLLM 0.32 prefill engine, shortened.
const REPLY: &[u8] = br#"{"id":"cmpl-1","choices":[{"index":0,"text":"x"}],"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[6, 7],[8]],"remote_engine_id":"4a2c","remote_request_id":"cmpl-1-0-9f5e","remote_host":"10.1.2.3","remote_port":15601,"tp_size":1,"remote_num_tokens":371,"remote_blocks_expiry_time":null},"metrics":null}"#;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bodies/vllm")
}

fn endpoint(case: &str) -> Endpoint {
    match case.split('_').next() {
        Some("chat") => Endpoint::Chat,
        Some("completions") => Endpoint::Completions,
        Some("responses") => Endpoint::Responses,
        Some("messages") => Endpoint::Messages,
        _ => panic!("{case} names no endpoint"),
    }
}

fn compare(path: &Path, actual: &[u8]) {
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(path, actual).unwrap();
    }
    let expected = fs::read(path).unwrap_or_default();
    assert_eq!(
        String::from_utf8_lossy(actual),
        String::from_utf8_lossy(&expected),
        "{}",
        path.display()
    );
}

#[test]
fn vllm_legs_equal_their_files() {
    let mut cases = 0;
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        cases += 1;
        let case = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let body = fs::read(&path).unwrap();
        let endpoint = endpoint(&case);
        let scanned = scan(endpoint, &body).unwrap_or_else(|error| panic!("{case}: {error}"));
        let edits = vllm::prefill_edits(endpoint, &scanned, KvConnector::Shfs).unwrap();
        let prefill = patch::build(&body, &scanned, &edits);
        compare(&path.with_extension("prefill.snap"), &prefill);
        let HandOver::Members(members) = vllm::hand_over(REPLY, KvConnector::Shfs, "10.1.2.3")
        else {
            panic!("usable");
        };
        let prefix = patch::prefix(&body, &scanned, &members);
        let mut decode = prefix.bytes;
        decode.extend_from_slice(body.get(prefix.replace.end..).unwrap());
        compare(&path.with_extension("decode.snap"), &decode);
        for leg in [&prefill, &decode] {
            let leg = leg.strip_prefix(b"\xef\xbb\xbf").unwrap_or(leg);
            let value: serde_json::Value = serde_json::from_slice(leg).unwrap();
            assert_eq!(value.get("model").unwrap(), "llama", "{case}");
        }
    }
    assert!(cases >= 12, "{cases} cases");
}

#[test]
fn every_snapshot_has_its_body() {
    for entry in fs::read_dir(folder()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let (case, _) = name.split_once('.').unwrap();
        assert!(
            folder().join(case).with_extension("json").exists(),
            "{name}"
        );
    }
}
