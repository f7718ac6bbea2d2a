//! The host against a real Envoy: `envoy-1.40.txt` is what the fixture's probe streams logged on
//! Envoy 1.40.0 (V8), one POST of `{"a":1}` per path, and must be what they log here.
//!
//! The upstream there sent headers at once, then the chunks "one" and "two" 20 ms apart; nothing
//! after the headers of `/tick-held` and after the first chunk of `/tick-late` and `/tick-reset`;
//! it closed the connection on `/upstream-reset`, and after one chunk on `/upstream-cut`. The
//! plugin configuration was `probe tick=150`, the requests were far enough apart not to overlap.

use pd_wasm_tests::{Exchange, Fault, Script, Sent};

use crate::gateway;

const PATHS: [&str; 18] = [
    "/plain",
    "/hold",
    "/gather",
    "/tick-held",
    "/tick-late",
    "/tick-reset",
    "/tick-first",
    "/tick-resume",
    "/continue-body",
    "/resume-body",
    "/resume-inside",
    "/reply",
    "/reply-empty",
    "/reply-body",
    "/reply-and-resume",
    "/middle",
    "/upstream-reset",
    "/upstream-cut",
];

fn upstream(sent: &Sent) -> Script {
    match sent.path() {
        "/tick-held" => Script::stream(20, &[]).then_stall(),
        "/tick-late" | "/tick-reset" => Script::stream(20, &["one"]).then_stall(),
        "/upstream-reset" => Script::reset(),
        "/upstream-cut" => Script::stream(20, &["one"]).then_reset(),
        _ => Script::stream(20, &["one", "two"]),
    }
}

#[test]
fn every_callback_sees_what_it_sees_on_envoy() {
    let recorded: Vec<_> = include_str!("envoy-1.40.txt").lines().collect();
    let mut gateway = gateway("probe tick=150");
    gateway.other_engines(upstream);
    for path in PATHS {
        let flight = gateway.send(Exchange::post(path, "{\"a\":1}"));
        gateway.settle(flight, 1000);
        let all = gateway.logs();
        let own = all
            .iter()
            .filter_map(|line| line.text.strip_prefix("PROBE "));
        let own: Vec<_> = own.filter(|l| l.split(' ').next() == Some(path)).collect();
        let theirs: Vec<_> = recorded
            .iter()
            .copied()
            .filter(|l| l.split(' ').next() == Some(path))
            .collect();
        assert!(!theirs.is_empty(), "{path} was not recorded");
        assert_eq!(own, theirs, "{path}");
    }
    let faults = gateway.take_faults();
    assert!(
        faults
            .iter()
            .any(|fault| matches!(fault, Fault::ReplyAndResume { .. }))
    );
    assert_eq!(faults.len(), 1, "{faults:?}");
}
