//! Prompt lengths: learned from engines, counted with pushed tokenizers where it decides.

use crate::stand::{control, logged, pod, push, status_at, topology, with_tokenizers};
use pd_wasm_tests::{Exchange, Gateway, Outcome, Script};
use pd_wire::control::{TokenizerState, TokenizerStatus};
use pd_wire::names;
use pd_wire::tokenizer::{Message, TokenizerFile};
use pd_wire::topology::{MAX_MESSAGE, Stamp, WIRE_VERSION};
use serde_json::{Value, json};
use std::borrow::Cow;

/// Pods of `r0` take prompts up to so many tokens, those of `r1` longer ones.
const BOUND: u64 = 100;
const PLUGIN: &str = r#"{"promptLengthBucketing":true,"allowExplain":true}"#;
/// A byte-level tokenizer made by the library that engines use.
const REAL: &str = include_str!("../../../../filter/tokenizer/tests/data/bytes.json");
const COUNTS: &str = include_str!("../../../../filter/tokenizer/tests/data/counts.json");

/// A gateway with a pair for short prompts and one for long ones.
fn buckets(workers: usize, bound: u64) -> Gateway {
    let mut gateway = with_tokenizers(workers, PLUGIN);
    let range = |min: u64, max: Option<u64>| json!({"profiles": {"default": {"promptMin": min, "promptMax": max}}});
    let mut pods = crate::stand::two_pairs();
    for (at, pod) in pods.iter_mut().enumerate() {
        pod["config"] = json!(at / 2);
    }
    let mut topology = topology(1, &pods);
    topology["models"][0]["configs"] = json!([range(0, Some(bound)), range(bound + 1, None)]);
    push(&mut gateway, &topology).expect(200);
    gateway.other_engines(crate::stand::vllm);
    gateway
}

/// One token a word, whatever the word.
fn words() -> Value {
    json!({
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "BPE", "unk_token": "?", "fuse_unk": true, "vocab": {"?": 0}, "merges": []},
    })
}

fn message(sequence: u64, file: &str) -> Vec<u8> {
    let stamp = Stamp {
        version: WIRE_VERSION,
        agent: "agent-0".into(),
        epoch: 1,
        sequence,
    };
    let file = Cow::Borrowed(file.as_bytes());
    Message {
        stamp,
        model: "m".into(),
        file,
    }
    .encode()
    .unwrap()
}

/// Pushes a tokenizer and lets every worker see it.
fn tokenizer(gateway: &mut Gateway, sequence: u64, file: &str) -> Outcome {
    let put = control("PUT", names::PATH_TOKENIZERS).body(message(sequence, file));
    let outcome = gateway.run(put);
    gateway.advance(1200);
    outcome
}

fn ask(gateway: &mut Gateway, worker: usize, text: &str) -> (u64, String) {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": text}]});
    let request = Exchange::post("/v1/chat/completions", body.to_string()).worker(worker);
    let outcome = gateway.run(request.header("x-pd-explain", "true"));
    let decision = outcome.expect(200).header("x-pd-decision").unwrap();
    let (_, tokens) = decision.split_once("prompt_tokens=").unwrap();
    let tokens = tokens.split(';').next().unwrap().parse().unwrap();
    (tokens, outcome.header("target-pod").unwrap().to_owned())
}

fn tokenizer_at(gateway: &mut Gateway, worker: usize) -> TokenizerStatus {
    status_at(gateway, worker).tokenizers.remove(0)
}

/// 50 words of 8 letters: about 450 bytes, so 112 tokens by the bytes.
fn fifty_words() -> String {
    "abcdefgh ".repeat(50)
}

#[test]
fn near_a_bound_the_count_decides_and_not_the_estimate() {
    let mut gateway = buckets(2, BOUND);
    let estimated = (114, "r1-d".to_owned());
    assert_eq!(ask(&mut gateway, 0, &fifty_words()), estimated);
    assert_eq!(status_at(&mut gateway, 0).tokenizers, []);
    tokenizer(&mut gateway, 1, &words().to_string()).expect(200);
    // Nobody needed it: nothing is loaded, in no VM.
    assert_eq!(tokenizer_at(&mut gateway, 0).state, TokenizerState::Idle);
    assert_eq!(tokenizer_at(&mut gateway, 1).state, TokenizerState::Idle);
    // The request that finds it missing is estimated; a tick later it is there, in its VM.
    assert_eq!(ask(&mut gateway, 0, &fifty_words()), estimated);
    gateway.advance(200);
    assert_eq!(
        ask(&mut gateway, 0, &fifty_words()),
        (50, "r0-d".to_owned())
    );
    let status = tokenizer_at(&mut gateway, 0);
    assert_eq!((status.state, status.counted), (TokenizerState::Loaded, 1));
    assert_eq!((status.agent.as_str(), status.sequence), ("agent-0", 1));
    assert!(status.pages_before > 0 && status.pages_after >= status.pages_before);
    assert_eq!(tokenizer_at(&mut gateway, 1).state, TokenizerState::Idle);
    assert_eq!(ask(&mut gateway, 1, &fifty_words()), estimated);
    gateway.advance(200);
    assert_eq!(
        ask(&mut gateway, 1, &fifty_words()),
        (50, "r0-d".to_owned())
    );
    // Far from the bound there is nothing to decide, and nothing is counted.
    assert_eq!(ask(&mut gateway, 0, &"abcdefgh ".repeat(100)).0, 227);
    assert_eq!(ask(&mut gateway, 0, "short").0, 3);
    assert_eq!(tokenizer_at(&mut gateway, 0).counted, 1);
}

#[test]
fn a_real_tokenizer_counts_as_its_library_does_and_is_loaded_by_one_vm_after_the_other() {
    let counts: Vec<Value> = serde_json::from_str(COUNTS).unwrap();
    let count = &counts[15];
    let (text, tokens) = (
        count["text"].as_str().unwrap(),
        count["tokens"].as_u64().unwrap(),
    );
    assert_eq!(count["file"], "bytes.json");
    let mut gateway = buckets(2, 1000);
    let pushed = TokenizerFile::parse(REAL.as_bytes())
        .unwrap()
        .to_json()
        .unwrap();
    tokenizer(&mut gateway, 1, str::from_utf8(&pushed).unwrap()).expect(200);
    // Both want it in the same moment, and one of them is in the middle of loading another one.
    for worker in 0..2 {
        let (estimate, target) = ask(&mut gateway, worker, text);
        assert!(
            (1000..1100).contains(&estimate) && target == "r1-d",
            "{estimate}"
        );
    }
    let lease = [&[1_u8][..], &77_u32.to_le_bytes(), &[0; 12]].concat();
    let key = format!("pd{}.tokenizer.loading", pd_format(&mut gateway));
    gateway.shared().set(names::VM_ID, &key, &lease, 0).unwrap();
    gateway.advance(1000);
    for worker in 0..2 {
        assert_eq!(
            tokenizer_at(&mut gateway, worker).state,
            TokenizerState::Wanted
        );
    }
    let free = [&[1_u8][..], &[0; 16]].concat();
    gateway.shared().set(names::VM_ID, &key, &free, 0).unwrap();
    gateway.advance(300);
    for worker in 0..2 {
        assert_eq!(ask(&mut gateway, worker, text), (tokens, "r1-d".to_owned()));
        let status = tokenizer_at(&mut gateway, worker);
        assert_eq!(status.state, TokenizerState::Loaded);
        assert!(status.pages_after - status.pages_before < 100, "{status:?}");
        assert_eq!(status.bytes, pushed.len() as u64);
    }
}

fn pd_format(gateway: &mut Gateway) -> u8 {
    status_at(gateway, 0).format
}

#[test]
fn a_text_that_takes_too_long_is_estimated() {
    let mut gateway = buckets(1, 2500);
    tokenizer(&mut gateway, 1, &words().to_string()).expect(200);
    let text = |words: usize| "abcdefgh ".repeat(words);
    // From now on everything that is measured takes a ms: about 1.5 MB a second.
    gateway.slow_down(1000);
    ask(&mut gateway, 0, &text(1100));
    gateway.advance(500);
    assert_eq!(tokenizer_at(&mut gateway, 0).state, TokenizerState::Loaded);
    // 7 KB fit into 5 ms at that speed, 9.9 KB do not.
    assert_eq!(ask(&mut gateway, 0, &text(840)).0, 840);
    assert_eq!(tokenizer_at(&mut gateway, 0).counted, 1);
    let slow = tokenizer_at(&mut gateway, 0).tokens_per_ms;
    assert!((500..=840).contains(&slow), "{slow}");
    // A count that took 20 ms makes the VM careful at once.
    gateway.slow_down(20_000);
    assert_eq!(ask(&mut gateway, 0, &text(840)).0, 840);
    let estimate = ask(&mut gateway, 0, &text(840)).0;
    assert!((1880..1900).contains(&estimate), "{estimate}");
    assert_eq!(tokenizer_at(&mut gateway, 0).counted, 2);
}

#[test]
fn a_tokenizer_that_is_none_is_refused_and_one_that_cannot_be_built_is_reported() {
    let mut gateway = buckets(1, BOUND);
    let mut refused = |body: Vec<u8>| {
        let outcome = gateway.run(control("PUT", names::PATH_TOKENIZERS).body(body));
        assert!(!outcome.json()["error"].as_str().unwrap().is_empty());
        outcome.status.unwrap()
    };
    assert_eq!(refused(Vec::new()), 400);
    assert_eq!(refused(b"{}".to_vec()), 400);
    assert_eq!(refused(message(1, "not json")), 400);
    assert_eq!(refused(message(1, REAL.get(..9000).unwrap())), 400);
    assert_eq!(
        refused(message(1, r#"{"model":{"type":"Unigram","vocab":[]}}"#)),
        400
    );
    assert_eq!(refused(vec![b' '; MAX_MESSAGE + 1]), 413);
    let mut unbuildable = words();
    unbuildable["model"]["merges"] = json!(["x"]);
    assert_eq!(refused(message(1, &unbuildable.to_string())), 400);
    assert_eq!(status_at(&mut gateway, 0).tokenizers, []);

    // Right in form; that the expression is none shows when it is built.
    unbuildable["model"]["merges"] = json!([]);
    unbuildable["pre_tokenizer"] =
        json!({"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated"});
    tokenizer(&mut gateway, 1, &unbuildable.to_string()).expect(200);
    ask(&mut gateway, 0, &fifty_words());
    gateway.advance(300);
    let status = tokenizer_at(&mut gateway, 0);
    assert_eq!(status.state, TokenizerState::Failed);
    assert!(status.error.contains("pre_tokenizer"), "{}", status.error);
    assert!(logged(&gateway, "the tokenizer of m cannot be loaded"));
    assert_eq!(
        ask(&mut gateway, 0, &fifty_words()),
        (114, "r1-d".to_owned())
    );
    // Older than what is held, then newer and good.
    tokenizer(&mut gateway, 1, &words().to_string()).expect(409);
    tokenizer(&mut gateway, 2, &words().to_string()).expect(200);
    ask(&mut gateway, 0, &fifty_words());
    gateway.advance(300);
    assert_eq!(ask(&mut gateway, 0, &fifty_words()).0, 50);
}

#[test]
fn tokenizers_are_pushed_with_the_token_and_to_the_control_listener_only() {
    let hash = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
    let mut gateway = with_tokenizers(1, &format!(r#"{{"controlTokens":["{hash}"]}}"#));
    let put = |exchange: Exchange| exchange.body(message(1, &words().to_string()));
    gateway
        .run(put(control("PUT", names::PATH_TOKENIZERS)))
        .expect(401);
    let authorised =
        control("PUT", names::PATH_TOKENIZERS).header("authorization", "Bearer secret");
    gateway.run(put(authorised)).expect(200);
    gateway
        .run(put(Exchange::new("PUT", names::PATH_TOKENIZERS)))
        .expect(404);
}

#[test]
fn what_a_prefill_engine_counts_changes_the_estimates_of_all_workers() {
    let mut gateway = with_tokenizers(2, r#"{"allowExplain":true}"#);
    let pods = [
        pod("p", "prefill", Some("r"), "10.0.0.1:80"),
        pod("d", "decode", Some("r"), "10.0.0.2:80"),
    ];
    push(&mut gateway, &topology(1, &pods)).expect(200);
    // 2000 letters, the quotes and "user": 2008 bytes, 502 tokens by the bytes.
    let text = "a".repeat(2000);
    gateway.other_engines(|sent| {
        let reply = crate::stand::vllm(sent);
        if sent.json()["max_tokens"] != 1 {
            return reply;
        }
        let usage = json!({"usage": {"prompt_tokens": 1004}, "kv_transfer_params": {}});
        Script::json(200, &usage)
    });
    assert_eq!(ask(&mut gateway, 0, &text).0, 502);
    assert_eq!(ask(&mut gateway, 1, &text).0, 502, "not merged yet");
    // A VM learns from some of a second's prompts only.
    for _ in 0..13 {
        (0..20).for_each(|_| drop(ask(&mut gateway, 0, &text)));
        gateway.advance(1000);
    }
    gateway.advance(2200);
    let learned = status_at(&mut gateway, 0).estimates;
    assert_eq!(learned.len(), 1);
    let ratio = learned[0].bytes_per_token;
    assert!((2.0..2.02).contains(&ratio), "{ratio}");
    assert_eq!(status_at(&mut gateway, 1).estimates, learned);
    for worker in 0..2 {
        assert!((995..=1004).contains(&ask(&mut gateway, worker, &text).0));
    }
    // A VM that starts anew begins with what is known.
    gateway.reload_vm(1).unwrap();
    assert!(ask(&mut gateway, 1, &text).0 > 990);
}

#[test]
fn a_pushed_tokenizer_costs_requests_no_call_of_the_store() {
    let mut gateway = buckets(1, BOUND);
    let reads = |gateway: &mut Gateway| {
        // Between two ticks: only the request itself is seen.
        ask(gateway, 0, &fifty_words());
        let before = gateway.shared().counts;
        ask(gateway, 0, &fifty_words());
        let after = gateway.shared().counts;
        (after.gets - before.gets, after.sets - before.sets)
    };
    let without = reads(&mut gateway);
    tokenizer(&mut gateway, 1, &words().to_string()).expect(200);
    assert_eq!(reads(&mut gateway), without, "not loaded");
    gateway.advance(300);
    assert_eq!(reads(&mut gateway), without, "counting");
    assert_eq!(tokenizer_at(&mut gateway, 0).counted, 2);
}
