//! Counters: names, labels, one ending per request.

use crate::stand::{bare, chat, endings, engine_error, healthy, last_pending, prefilled, total};
use pd_wasm_tests::Exchange;

#[test]
fn names_and_labels_are_these() {
    let mut gateway = healthy(2, "");
    gateway.run(chat(true)).expect(200);
    gateway.run(chat(false).worker(1)).expect(200);
    gateway
        .run(Exchange::post(
            "/v1/chat/completions",
            r#"{"model":"x{y},z"}"#,
        ))
        .expect(404);
    gateway
        .run(Exchange::post("/v1/chat/completions", "{"))
        .expect(400);
    // Two workers, each with a tick of its own.
    gateway.advance(200);
    let meters = gateway.meters();
    assert_eq!(
        meters.names(),
        [
            "gateway_prefill_request_success_total{model=m,status=pd-prefill-request-success,status_code=200}",
            "gateway_request_model_fail_total{model=,status=bad_request,status_code=400}",
            "gateway_request_model_fail_total{model=,status=model_not_found,status_code=404}",
            "gateway_request_model_success_total{model=m,status=gateway_request_success,status_code=200}",
            "pd_topology_age_seconds",
        ]
    );
    assert_eq!(meters.counter(&meters.names()[3]), 2);
}

#[test]
fn unknown_models_and_paths_do_not_grow_the_label_set() {
    let mut gateway = bare(1, "");
    let before = gateway.meters().names().len();
    for number in 0..50 {
        let body = format!(r#"{{"model":"model-{number}"}}"#);
        gateway
            .run(Exchange::post("/v1/chat/completions", body))
            .expect(404);
        gateway
            .run(Exchange::get(&format!("/path-{number}")))
            .expect(404);
    }
    assert!(gateway.meters().names().len() <= before + 2);
}

#[test]
fn a_retry_counts_one_failed_leg_and_one_ending() {
    let mut gateway = bare(1, "");
    let flight = gateway.send(chat(true));
    let call = last_pending(&gateway);
    gateway.answer(call.id, engine_error(503));
    let call = last_pending(&gateway);
    gateway.answer(call.id, prefilled());
    crate::stand::finish(&mut gateway, flight);
    assert_eq!(total(&mut gateway, "gateway_prefill_request_fail_total"), 1);
    assert_eq!(
        total(&mut gateway, "gateway_prefill_request_success_total"),
        1
    );
    assert_eq!(endings(&mut gateway), 1);
}
