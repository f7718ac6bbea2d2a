//! The request side: headers, bodies, pauses, edits, properties, metrics, clocks.

use pd_wasm_tests::{Ending, Exchange, Fault, Gateway, GatewayConfig, LogLevel, Script};

use crate::{config, gateway, logged};

#[test]
fn a_request_passes_through_and_is_logged_and_deleted() {
    let mut gateway = gateway("");
    gateway.other_engines(|sent| Script::answer(200, format!("hello {}", sent.path())));
    let outcome = gateway.run(Exchange::post("/pass", "ab").chunked(1));
    assert_eq!(outcome.expect(200).text(), "hello /pass");
    assert_eq!(outcome.upstream().body, b"ab");
    assert!(outcome.upstream().ended && !outcome.upstream().cut);
    let callbacks = [
        "request_headers",
        "request_body",
        "request_body",
        "request_body",
        "response_headers",
        "response_body",
        "response_body",
        "log",
        "done",
        "delete",
    ];
    assert_eq!(outcome.callbacks, callbacks);
    assert!(outcome.deleted);
    assert_eq!(outcome.code_details.as_deref(), Some("via_upstream"));
    assert!(logged(&gateway, "log /pass 200"));
    assert_eq!(gateway.live_streams(0), 0);
}

#[test]
fn header_edits_reach_the_upstream() {
    let mut gateway = gateway("");
    gateway.other_engines(|_| Script::answer(200, ""));
    let outcome = gateway.run(Exchange::get("/edit").header("x-gone", "1"));
    outcome.expect(200);
    let headers = &outcome.upstream().headers;
    let two: Vec<_> = headers
        .iter()
        .filter(|(n, _)| *n == "x-two")
        .map(|(_, v)| v)
        .collect();
    assert_eq!(two, [b"a", b"b"]);
    assert_eq!(
        (headers.text("x-count"), headers.text("x-gone")),
        (Some("6"), None)
    );
}

#[test]
fn a_paused_request_buffers_and_passes_on_whole() {
    let mut gateway = gateway("");
    gateway.other_engines(|_| Script::answer(200, ""));
    let flight = gateway.begin(Exchange::new("POST", "/buffer"));
    gateway.body(flight, b"abc", false);
    gateway.body(flight, b"def", false);
    assert!(gateway.outcome(flight).upstream.is_none());
    gateway.body(flight, b"", true);
    let outcome = gateway.outcome(flight);
    assert_eq!(outcome.expect(200).upstream().body, b"abcdef");
    assert_eq!(outcome.upstream().header("x-seen"), Some("abcdef"));
}

#[test]
fn the_first_byte_of_a_body_can_be_replaced() {
    let mut gateway = gateway("");
    gateway.other_engines(|_| Script::answer(200, ""));
    let outcome = gateway.run(Exchange::post("/prefix", "{\"a\":1}").chunked(3));
    assert_eq!(outcome.upstream().body, b"{\"k\":0,\"a\":1}");
}

#[test]
fn an_older_host_refuses_to_replace_the_first_byte() {
    let old = GatewayConfig {
        first_byte_edit: false,
        ..config("")
    };
    let mut gateway = Gateway::new(old);
    let outcome = gateway.run(Exchange::post("/prefix", "{\"a\":1}"));
    outcome.expect(503);
    let faults = gateway.take_faults();
    assert!(
        matches!(&faults[..], [Fault::Trap { vm: 0, .. }]),
        "{faults:?}"
    );

    let old = GatewayConfig {
        first_byte_edit: false,
        properties: vec![("old_host".into(), b"yes".to_vec())],
        ..config("")
    };
    let mut gateway = Gateway::new(old);
    gateway.other_engines(|_| Script::answer(200, ""));
    let outcome = gateway.run(Exchange::post("/prefix", "{\"a\":1}"));
    assert_eq!(outcome.upstream().body, b"{\"k\":0,\"a\":1}");
}

#[test]
fn without_stop_iteration_a_pause_silences_body_callbacks_while_the_size_grows() {
    let mut gateway = Gateway::new(GatewayConfig {
        allow_on_headers_stop_iteration: false,
        ..config("tick=50")
    });
    let flight = gateway.send(Exchange::post("/never", "0123456789"));
    assert_eq!(gateway.outcome(flight).callbacks, ["request_headers"]);
    // The watchdog still works on such a stream.
    gateway.settle(flight, 100);
    gateway.outcome(flight).expect(504);
    assert_eq!(gateway.now_ms(), 50);
}

#[test]
fn the_total_size_counts_headers_and_body() {
    let mut gateway = gateway("");
    gateway.other_engines(|_| Script::answer(200, ""));
    let exchange = Exchange::post("/size", "0123456789").end_with_last_chunk();
    let headers: usize = [
        ":methodPOST",
        ":path/size",
        ":authoritygateway.test",
        ":schemehttp",
    ]
    .map(str::len)
    .iter()
    .sum::<usize>()
        + "content-length10".len();
    let outcome = gateway.run(exchange);
    let total = (headers + 10).to_string();
    assert_eq!(outcome.upstream().header("x-total"), Some(total.as_str()));
}

#[test]
fn properties_come_from_the_request_the_test_and_the_filter() {
    let mut gateway = Gateway::new(GatewayConfig {
        properties: vec![("xds.route_name".into(), b"route".to_vec())],
        ..config("")
    });
    let exchange = Exchange::get("/properties")
        .header("user-agent", "curl")
        .property("xds.filter_chain_name", "control");
    let outcome = gateway.run(exchange);
    assert_eq!(
        outcome.expect(200).text(),
        "route control pod-a curl 1 GET true"
    );
    assert_eq!(outcome.filter_state["decision"], b"pod-a");
}

#[test]
fn metrics_are_readable_by_name() {
    let mut gateway = gateway("");
    let outcome = gateway.run(Exchange::get("/metrics"));
    assert_eq!(outcome.expect(200).text(), "BadArgument 4");
    assert_eq!(gateway.meters().counter("requests"), 2);
    assert_eq!(gateway.meters().gauge("open{pod=a}"), 4);
    assert_eq!(gateway.meters().histogram("ms"), [12]);
    assert_eq!(gateway.meters().names(), ["ms", "open{pod=a}", "requests"]);
}

#[test]
fn clocks_move_only_when_told() {
    let mut gateway = gateway("");
    let first = gateway.run(Exchange::get("/clock")).text();
    assert_eq!(gateway.run(Exchange::get("/clock")).text(), first);
    let wall: u64 = first.split(' ').next().unwrap().parse().unwrap();
    assert!(first.ends_with(" 1000"));
    gateway.advance(250);
    gateway.step_wall_clock(-1000);
    let text = gateway.run(Exchange::get("/clock")).text();
    assert_eq!(text, format!("{} 1000", wall - 750));
    assert_eq!(gateway.now_ms(), 250);
}

#[test]
fn a_wrong_content_length_is_a_fault() {
    let mut gateway = gateway("");
    gateway.other_engines(|_| Script::answer(200, ""));
    gateway.run(Exchange::post("/wrong-length", "abc"));
    let expected = Fault::ContentLength {
        stream: 2,
        declared: "99".into(),
        sent: 3,
    };
    assert_eq!(gateway.take_faults(), [expected]);
}

#[test]
fn reply_and_resume_in_one_callback_is_a_fault() {
    let mut gateway = gateway("");
    let outcome = gateway.run(Exchange::get("/reply-and-resume"));
    outcome.expect(418);
    assert!(
        gateway
            .take_faults()
            .contains(&Fault::ReplyAndResume { stream: 2 })
    );
}

#[test]
fn a_resume_from_inside_the_headers_callback_lets_them_go() {
    let mut gateway = gateway("");
    gateway.other_engines(|_| Script::answer(200, ""));
    let outcome = gateway.run(Exchange::post("/resume-inside", "abc"));
    assert_eq!(outcome.expect(200).upstream().body, b"abc");
}

#[test]
fn a_resume_of_a_side_that_is_not_paused_is_a_fault() {
    let mut gateway = gateway("tick=10");
    gateway.send(Exchange::get("/resume-later"));
    gateway.advance(10);
    assert_eq!(
        gateway.take_faults(),
        [Fault::ResumeNotPaused { stream: 2 }]
    );
}

#[test]
#[should_panic(expected = "faults of the guest")]
fn an_unread_fault_fails_the_test() {
    let mut gateway = gateway("");
    gateway.run(Exchange::get("/reply-and-resume"));
}

#[test]
fn a_client_that_leaves_ends_the_stream_once() {
    let mut gateway = gateway("");
    let flight = gateway.send(Exchange::post("/pause", "abc"));
    gateway.disconnect(flight);
    gateway.disconnect(flight);
    let outcome = gateway.outcome(flight);
    assert_eq!(outcome.ending, Ending::Disconnected);
    assert_eq!(outcome.status, None);
    assert!(outcome.callbacks.ends_with(&["log", "done", "delete"]));
    assert_eq!(
        outcome
            .callbacks
            .iter()
            .filter(|name| **name == "log")
            .count(),
        1
    );
    assert_eq!(
        outcome.code_details.as_deref(),
        Some("downstream_remote_disconnect")
    );
    assert!(
        gateway
            .logs()
            .iter()
            .all(|line| line.level < LogLevel::Error)
    );
}

#[test]
fn a_body_over_the_buffer_limit_is_a_413() {
    let mut gateway = Gateway::new(GatewayConfig {
        request_body_buffer_limit: 8,
        ..config("")
    });
    let outcome = gateway.run(Exchange::post("/pause", "0123456789").chunked(4));
    let details = outcome.expect(413).code_details.as_deref();
    assert_eq!(details, Some("request_payload_too_large"));
    assert!(outcome.deleted);
}
