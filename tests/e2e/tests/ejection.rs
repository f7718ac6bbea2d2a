//! Engines that fail are left alone until a trial brings them back; full ones are a 429.

use std::time::Duration;

use pd_e2e::{Answer, Call, Pod, Stand, chat_body, eventually, prompt_of};
use pd_engine_sim::{Cut, Fault, FaultKind, On};
use pd_wire::control::Ejected;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

async fn chat(stand: &Stand, prompt: &str, stream: bool) -> Answer {
    stand
        .send(Call::post(CHAT, chat_body(prompt, stream)))
        .await
}

/// Two rolesets; every tie goes to the first.
async fn two_pairs(name: &str, eject_time: f64) -> Stand {
    let plugin = json!({
        "tieSeed": 1,
        "prefillScorePolicy": "least_request",
        "ejectAfterFailures": 3,
        "ejectTime": eject_time,
    });
    start(name, Pod::pairs(2), &plugin).await
}

async fn start(name: &str, pods: Vec<Pod>, plugin: &Value) -> Stand {
    Stand::builder(name).pods(pods).plugin(plugin).start().await
}

async fn ejected(stand: &Stand) -> Vec<Ejected> {
    stand.envoy.status().await.unwrap().ejected
}

async fn retries(stand: &Stand) -> u64 {
    let page = stand.envoy.metrics().await.unwrap();
    let counted = page
        .lines()
        .filter(|line| line.starts_with("gateway_pd_prefill_retry_total{"))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    counted.sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_down_costs_a_few_retries_and_comes_back_by_a_trial() {
    let stand = two_pairs("eject-down", 4.0).await;
    stand.engine("prefill-r0").refuse(false);
    let out = eventually("the engine is ejected", || async {
        chat(&stand, "retried", false).await.expect(200);
        match ejected(&stand).await.pop() {
            Some(out) => Ok(out),
            None => Err("nobody is"),
        }
    })
    .await;
    assert!(
        out.pods[0].ends_with("/prefill-r0"),
        "{out:?} is the engine that is down"
    );
    assert_eq!((out.cause.as_str(), out.times), ("transport", 1));
    eventually("both workers spare it", || async {
        let before = retries(&stand).await;
        for n in 0..20 {
            let answer = chat(&stand, &format!("spared {n}"), false).await;
            let answer = answer.expect(200);
            assert_eq!(answer.header("prefill-target-pod"), "prefill-r1");
        }
        match retries(&stand).await - before {
            0 => Ok(()),
            more => Err(format!("{more} retries")),
        }
    })
    .await;
    stand.engine("prefill-r0").resume();
    eventually("a trial brings it back", || async {
        let answer = chat(&stand, "trial", false).await.expect(200);
        prompt_of(&answer);
        match answer.header("prefill-target-pod") {
            "prefill-r0" => Ok(()),
            other => Err(other.to_owned()),
        }
    })
    .await;
    assert_eq!(ejected(&stand).await, []);
    let page = stand.envoy.metrics().await.unwrap();
    let counted = page.lines().any(|line| {
        line.starts_with("gateway_pd_ejection_total{")
            && line.contains("kind=\"prefill\"")
            && line.contains("class=\"transport\"")
            && line.contains("model=")
    });
    assert!(counted, "{page}");
    let log = stand.envoy.log();
    assert!(log.contains("is ejected for 4 s: transport after 3 failures in a row"));
    assert!(log.contains("serves again"));
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pair_that_cannot_hand_over_is_parted() {
    let stand = two_pairs("eject-pair", 60.0).await;
    let kind = FaultKind::ErrorMidStream { after_chunks: 0 };
    let fault = Fault::every(On::Decode, kind);
    assert!(stand.engine("decode-r0").inject(fault));
    let out = eventually("the pair is ejected", || async {
        let answer = chat(&stand, "may fail", true).await;
        assert!([200, 502].contains(&answer.status), "{}", answer.shown());
        let out = ejected(&stand).await;
        if out.is_empty() {
            Err("nobody is")
        } else {
            Ok(out)
        }
    })
    .await;
    assert_eq!(out[0].cause, "hand_over");
    assert!(out[0].pods[0].ends_with("/prefill-r0") && out[0].pods[1].ends_with("/decode-r0"));
    eventually("both workers spare it", || async {
        for n in 0..10 {
            let answer = chat(&stand, &format!("spared {n}"), true).await;
            if answer.header("target-pod") != "decode-r1" {
                return Err(answer.shown());
            }
            answer.expect(200);
        }
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn single_lost_connections_and_overload_eject_nobody() {
    let stand = two_pairs("eject-none", 60.0).await;
    let status = |code| FaultKind::Status {
        code,
        body: None,
        headers: Default::default(),
    };
    let cut = FaultKind::ResetBeforeHeaders {
        how: Cut::Fin,
        after_ms: 0,
        after_work: false,
    };
    for kind in [status(503), status(429), cut] {
        for n in 0..3 {
            let fault = Fault::next(1, On::Prefill, kind.clone());
            assert!(stand.engine("prefill-r0").inject(fault));
            let answer = chat(&stand, &format!("{kind:?} {n}"), false).await;
            assert_eq!(answer.status, 200, "{kind:?}: {}", answer.shown());
        }
        assert_eq!(ejected(&stand).await, [], "{kind:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_at_their_capacity_are_a_429_that_says_when_to_come_back() {
    let plugin = json!({ "maxDecodePerPod": 1 });
    let stand = start("capacity", Pod::pairs(1), &plugin).await;
    let stalls = FaultKind::StallMidStream {
        after_chunks: 2,
        ms: Some(1500),
    };
    assert!(
        stand
            .engine("decode-r0")
            .inject(Fault::next(1, On::Decode, stalls))
    );
    let body = chat_body("takes the only place", true);
    let mut held = Call::post(CHAT, body)
        .start(stand.envoy.data())
        .await
        .unwrap();
    assert!(held.next().await.unwrap().is_some());
    let refused = chat(&stand, "no room", false).await.expect(429);
    assert!(refused.header("retry-after").parse::<u32>().unwrap() > 0);
    held.finish().await.unwrap();
    // The engine's own count of its requests is as old as its last scrape.
    eventually("there is room again", || async {
        let answer = chat(&stand, "room again", false).await;
        if answer.status == 200 {
            Ok(())
        } else {
            Err(answer.shown())
        }
    })
    .await;
    stand.settled(Duration::from_secs(5)).await;
}
