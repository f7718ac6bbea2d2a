//! A worker that traps, and how the others get over it.

use crate::stand::{
    assert_quiet, charged, chat, config, decoding, finish, prefilled, push, topology, two_pairs,
    variant, vllm,
};
use pd_wasm_tests::{Ending, Fault, Gateway, GatewayConfig, Module, Script};

#[test]
fn a_trap_takes_one_worker_and_its_charges_come_back() {
    let mut gateway = Gateway::new(GatewayConfig {
        module: Some(Module::load(&variant("trap"))),
        ..config(2, "")
    });
    push(&mut gateway, &topology(1, &two_pairs())).expect(200);
    let alive = decoding(&mut gateway, chat(true));
    let doomed = decoding(&mut gateway, chat(true).worker(1));
    gateway.advance(300);
    assert_eq!(charged(&mut gateway).decode_running, 2);

    gateway
        .run(chat(true).worker(1).header("x-pd-test-trap", "1"))
        .expect(503);
    assert!(matches!(gateway.take_faults()[..], [Fault::Trap { .. }]));
    assert!(gateway.is_lost(1) && !gateway.is_lost(0));
    gateway.respond_headers(doomed, &[(":status", "200")], false);
    assert_eq!(gateway.outcome(doomed).expect(503).ending, Ending::Complete);
    finish(&mut gateway, alive);
    gateway.outcome(alive).expect(200);

    gateway.advance(1000);
    gateway.reload_vm(1).unwrap();
    gateway.other_engines(vllm);
    gateway.run(chat(true).worker(1)).expect(200);
    gateway.advance(4000);
    assert_quiet(&mut gateway, 2);
}

#[test]
fn answers_of_every_shape_trap_nothing() {
    let huge = format!(r#"{{"a":"{}"}}"#, "x".repeat(4 << 20));
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let nested = format!(r#"{{"kv_transfer_params":{deep}}}"#);
    let replies: Vec<Vec<u8>> = vec![
        Vec::new(),
        vec![0xff; 100],
        vec![0; 100],
        huge.into_bytes(),
        deep.clone().into_bytes(),
        nested.into_bytes(),
        br#"{"kv_transfer_params":{"do_remote_prefill":true"#.to_vec(),
    ];
    for status in [100, 200, 204, 301, 400, 418, 503, 599] {
        for reply in &replies {
            let mut gateway = Gateway::new(config(1, ""));
            push(&mut gateway, &topology(1, &two_pairs())).expect(200);
            let flight = gateway.send(chat(true));
            for _ in 0..3 {
                let Some(call) = gateway.pending_calls().pop() else {
                    break;
                };
                let script = prefilled().status(status);
                let script = if status == 200 && reply.is_empty() {
                    script
                } else {
                    Script::answer(status, reply.clone())
                };
                gateway.answer(call.id, script);
            }
            if gateway.outcome(flight).upstream.is_some() {
                finish(&mut gateway, flight);
            }
            assert_eq!(gateway.outcome(flight).ending, Ending::Complete, "{status}");
            assert_quiet(&mut gateway, 1);
        }
    }
}

#[test]
fn a_refusal_of_megabytes_takes_no_more_memory_than_its_bytes() {
    // Each value of a JSON tree takes many times its bytes.
    let list = vec![r#"{"":0}"#; 1 << 19].join(",");
    let refusals = [
        format!(r#"{{"error":{{"message":"no","a":[{list}]}}}}"#),
        format!(r#"{{"object":"error","message":"no","a":[{list}]}}"#),
    ];
    for refusal in refusals {
        let mut gateway = Gateway::new(config(1, ""));
        push(&mut gateway, &topology(1, &two_pairs())).expect(200);
        let before = gateway.memory_pages(0);
        let flight = gateway.send(chat(false));
        let call = gateway.pending_calls().pop().unwrap();
        let bytes = refusal.len() as u64;
        gateway.answer(call.id, Script::answer(400, refusal.into_bytes()));
        gateway.outcome(flight).expect(400);
        let grown = (gateway.memory_pages(0) - before) * (64 << 10);
        assert!(grown < 4 * bytes, "{grown} bytes for {bytes}");
        assert_quiet(&mut gateway, 1);
    }
}

#[test]
fn requests_of_every_shape_trap_nothing() {
    let mut gateway = Gateway::new(config(1, ""));
    push(&mut gateway, &topology(1, &two_pairs())).expect(200);
    gateway.other_engines(vllm);
    let deep = "[".repeat(200_000);
    for body in [
        vec![0xff; 10],
        vec![0; 10],
        deep.clone().into_bytes(),
        format!(r#"{{"model":"m","messages":{deep}"#).into_bytes(),
        format!(r#"{{"model":"{}"}}"#, "x".repeat(1 << 20)).into_bytes(),
        format!(r#"{{"model":"m","{}":1}}"#, "k".repeat(1 << 20)).into_bytes(),
        b"{\"model\":\"m\\ud800\"}".to_vec(),
        b"\xef\xbb\xbf".to_vec(),
    ] {
        let exchange = pd_wasm_tests::Exchange::post("/v1/chat/completions", body);
        let outcome = gateway.run(exchange.chunked(65_536));
        assert!(
            matches!(outcome.status, Some(200 | 400 | 404)),
            "{outcome:#?}"
        );
    }
    let odd = chat(true).header("x-request-id", &"é".repeat(5000));
    gateway.run(odd).expect(200);
    assert_quiet(&mut gateway, 1);
}
