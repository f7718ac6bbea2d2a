//! The agent may go, Envoy may restart, pushes may be wrong: service goes on with what is known.

use std::time::{Duration, Instant};

use anyhow::ensure;
use pd_e2e::{Call, Envoy, Pod, Stand, chat_body, eventually, prompt_of, within};
use pd_wire::control::PushReply;
use pd_wire::names::{PATH_SAMPLES, PATH_TOPOLOGY};
use pd_wire::topology::{MAX_MESSAGE, Model, Role, Stamp, Topology};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread")]
async fn traffic_goes_on_without_the_agent() {
    let mut stand = Stand::pairs("agent-gone", 2).await;
    stand.agent.as_mut().unwrap().kill();
    let end = Instant::now() + Duration::from_secs(3);
    let mut sent = 0;
    while Instant::now() < end {
        let call = Call::post(CHAT, chat_body(&format!("without {sent}"), sent % 2 == 0));
        prompt_of(&stand.send(call).await.expect(200));
        sent += 1;
    }
    println!("{sent} requests without an agent");
    stand.send(Call::get("/readyz")).await.expect(200);
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_pushes_again_when_envoy_restarted() {
    let mut stand = Stand::pairs("restart", 1).await;
    stand.envoy.restart().await.unwrap();
    // Sent at once: it waits for the snapshot instead of failing.
    let answer = stand
        .send(Call::post(CHAT, chat_body("early", false)))
        .await
        .expect(200);
    println!("first answer {:?} after Envoy was up", answer.total);
    assert!(answer.total < Duration::from_secs(2), "{:?}", answer.total);
    stand.ready().await;
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_snapshot_a_request_waits_two_seconds_and_readyz_says_503() {
    let builder = Stand::builder("no-snapshot")
        .pods(Pod::pairs(1))
        .without_agent();
    let mut stand = builder.start().await;
    stand.send(Call::get("/readyz")).await.expect(503);
    let answer = stand
        .send(Call::post(CHAT, chat_body("x", false)))
        .await
        .expect(503);
    println!("gave up after {:?}", answer.total);
    assert!(
        answer.total >= Duration::from_millis(1900),
        "{:?}",
        answer.total
    );
    assert!(
        answer.total <= Duration::from_millis(3500),
        "{:?}",
        answer.total
    );
    // One that is waiting is served when the snapshot comes.
    let waiting = Call::post(CHAT, chat_body("y", true)).send(stand.envoy.data());
    let waiting = tokio::spawn(waiting);
    stand.start_agent().unwrap();
    let answer = waiting.await.unwrap().unwrap().expect(200);
    println!("served after {:?}", answer.total);
    prompt_of(&answer);
    stand.ready().await;
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_of_the_pods_file_reach_the_filter() {
    let mut stand = Stand::builder("pods-file")
        .pods(Pod::pairs(2))
        .start()
        .await;
    let gone = "r0";
    stand
        .change_pods(|pods| pods.retain(|pod| pod.roleset.as_deref() != Some(gone)))
        .await
        .unwrap();
    stand.ready().await;
    for n in 0..8 {
        let call = Call::post(CHAT, chat_body(&format!("after {n}"), false));
        let answer = stand.send(call).await.expect(200);
        assert_eq!(answer.header("target-pod"), "decode-r1");
    }
    // A pod that is drained takes no new requests.
    stand
        .change_pods(|pods| {
            pods.iter_mut().for_each(|pod| {
                pod.annotations
                    .insert("model.aibrix.ai/drain".to_owned(), "true".to_owned());
            });
        })
        .await
        .unwrap();
    for _ in 0..8 {
        let call = Call::post(CHAT, chat_body("drained", false));
        stand.send(call).await.expect(503);
    }
    stand.settled(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_answers_for_itself_and_ends_on_sigterm() {
    let mut stand = Stand::pairs("agent-pages", 1).await;
    stand
        .send(Call::post(CHAT, chat_body("x", false)))
        .await
        .expect(200);
    let agent = stand.agent.as_mut().unwrap();
    assert_eq!(agent.page("/healthz").await.unwrap().status, 200);
    assert_eq!(agent.page("/readyz").await.unwrap().status, 200);
    let page = agent.page("/metrics").await.unwrap();
    assert_eq!(page.status, 200);
    assert!(page.text().contains("# TYPE "), "{}", page.shown());
    assert_eq!(agent.terminate(), Some(0), "{}", agent.log());
}

fn topology(epoch: u64, sequence: u64, names: &[&str]) -> Topology {
    let pod = |name: &&str| pd_wire::topology::Pod {
        namespace: "test".to_owned(),
        name: (*name).to_owned(),
        uid: format!("uid-{name}"),
        address: "127.0.0.1:9".to_owned(),
        role: if name.starts_with("prefill") {
            Role::Prefill
        } else {
            Role::Decode
        },
        roleset: Some("r0".to_owned()),
        engine: "vllm".to_owned(),
        kv_connector: None,
        bootstrap_port: None,
        restarts: 0,
        config: None,
        ready: true,
        draining: false,
        labels: Default::default(),
    };
    Topology {
        stamp: Stamp {
            version: pd_wire::topology::WIRE_VERSION,
            agent: "test-agent".to_owned(),
            epoch,
            sequence,
        },
        replicas: 1,
        models: vec![Model {
            name: "pushed-model".to_owned(),
            configs: Vec::new(),
            pods: names.iter().map(pod).collect(),
        }],
    }
}

/// Pushes and returns status and reply.
async fn push(envoy: &Envoy, path: &str, body: Vec<u8>) -> (u16, PushReply) {
    let answer = envoy.push(path, body).await.unwrap();
    let reply = serde_json::from_slice(&answer.bytes());
    let Ok(reply) = reply else {
        panic!("no push reply: {}", answer.shown())
    };
    (answer.status, reply)
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_pushes_are_refused_and_the_snapshot_stays() {
    let stand = Stand::builder("pushes").without_agent().start().await;
    let envoy = &stand.envoy;
    let bytes = |t: &Topology| serde_json::to_vec(t).unwrap();
    let good = topology(5, 3, &["decode-r0", "prefill-r0"]);
    let (status, reply) = push(envoy, PATH_TOPOLOGY, bytes(&good)).await;
    assert_eq!(
        (status, reply.epoch, reply.sequence),
        (200, 5, 3),
        "{reply:?}"
    );

    let stays = || async {
        let held = envoy.status().await?.topology;
        let shown = held
            .as_ref()
            .map(|t| (t.epoch, t.sequence, t.pods, t.agent.as_str()));
        ensure!(shown == Some((5, 3, 2, "test-agent")), "{held:?}");
        let list = Call::get("/v1/models").send(envoy.data()).await?.json();
        ensure!(list["data"][0]["id"] == "pushed-model", "{list}");
        Ok(())
    };
    eventually("the snapshot is held", stays).await;

    let mut other_version = serde_json::to_value(topology(9, 1, &["decode-r0"])).unwrap();
    other_version["stamp"]["version"] = json!(99);
    let mut malformed = bytes(&topology(9, 1, &["decode-r0"]));
    malformed.truncate(malformed.len() / 2);
    let mut samples = b"PDS\x63".to_vec();
    samples.extend([0_u8; 40]);
    let cases = [
        (PATH_TOPOLOGY, 409, bytes(&topology(5, 2, &["decode-r0"]))),
        (PATH_TOPOLOGY, 409, bytes(&topology(4, 9, &["decode-r0"]))),
        (PATH_TOPOLOGY, 400, malformed),
        (PATH_TOPOLOGY, 400, b"not json".to_vec()),
        (PATH_TOPOLOGY, 400, Vec::new()),
        (
            PATH_TOPOLOGY,
            400,
            bytes(&topology(9, 1, &["decode-r0", "decode-r0"])),
        ),
        (PATH_TOPOLOGY, 413, vec![b' '; MAX_MESSAGE + 1]),
        (PATH_TOPOLOGY, 426, other_version.to_string().into_bytes()),
        (PATH_SAMPLES, 400, b"not samples".to_vec()),
        (PATH_SAMPLES, 426, samples),
    ];
    for (path, expected, body) in cases {
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        let (status, reply) = push(envoy, path, body).await;
        assert_eq!(status, expected, "{path} {shown}: {reply:?}");
        assert!(!reply.error.is_empty(), "{path} {shown}");
        if status == 409 {
            assert_eq!((reply.epoch, reply.sequence), (5, 3), "{reply:?}");
            assert_eq!(reply.agent, "test-agent");
        }
        let kept = stays().await;
        assert!(kept.is_ok(), "{path} {shown}: {kept:?}");
    }

    // A newer one is taken by every worker.
    let (status, _) = push(envoy, PATH_TOPOLOGY, bytes(&topology(6, 1, &["decode-r0"]))).await;
    assert_eq!(status, 200);
    within(
        Duration::from_secs(2),
        "the newer snapshot is held",
        || async {
            let held = envoy.status().await?.topology;
            ensure!(
                held.as_ref().is_some_and(|t| t.epoch == 6 && t.pods == 1),
                "{held:?}"
            );
            anyhow::Ok(())
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_tokens_configured_only_their_bearers_are_served() {
    // SHA-256 of "open sesame".
    let hash = "41ef4bb0b23661e66301aac36066912dac037827b4ae63a7b1165a5aa93ed4eb";
    let plugin = json!({ "controlTokens": [hash] });
    let stand = Stand::builder("tokens")
        .plugin(&plugin)
        .without_agent()
        .start()
        .await;
    let to = stand.envoy.control();
    let body = serde_json::to_vec(&topology(1, 1, &["decode-r0"])).unwrap();
    let put = || Call::put(PATH_TOPOLOGY, body.clone());
    for call in [
        put(),
        put().header("authorization", "Bearer wrong"),
        put().header("authorization", "open sesame"),
        put().header("authorization", "Bearer "),
        Call::get(pd_wire::names::PATH_STATUS),
        Call::get(pd_wire::names::PATH_LEDGERS),
    ] {
        let answer = call.send(to).await.unwrap();
        assert_eq!(answer.status, 401, "{}", answer.shown());
    }
    stand.send(Call::get("/readyz")).await.expect(503);
    let authorised = put().header("authorization", "Bearer open sesame");
    let answer = authorised.send(to).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.shown());
    eventually("the pushed model is listed", || async {
        let list = stand.send(Call::get("/v1/models")).await;
        if list.text().contains("pushed-model") {
            Ok(())
        } else {
            Err(list.shown())
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_drained_and_of_deleted_pods_go_on_to_their_end() {
    let pods = Pod::pairs(2)
        .into_iter()
        .map(|pod| pod.engine(|engine| engine.token_interval_ms = 1000.0));
    let mut stand = Stand::builder("pods-leave").pods(pods).start().await;
    let decode = ["decode-r0", "decode-r1"];
    // One on each pair: the other one is charged.
    let mut streams = Vec::new();
    for running in 1..=2 {
        let call = Call::post(CHAT, chat_body(&format!("stream {running}"), true));
        streams.push(tokio::spawn(call.send(stand.envoy.data())));
        eventually("it is at its decode pod", || async {
            let at = decode.map(|pod| stand.engine(pod).state().running);
            ensure!(at.iter().sum::<u64>() == running, "{at:?}");
            Ok(())
        })
        .await;
    }
    assert_eq!(decode.map(|pod| stand.engine(pod).state().running), [1, 1]);
    stand
        .change_pods(|pods| {
            pods.retain(|pod| pod.roleset.as_deref() != Some("r0"));
            for pod in pods {
                pod.annotations
                    .insert("model.aibrix.ai/drain".to_owned(), "true".to_owned());
            }
        })
        .await
        .unwrap();
    let call = Call::post(CHAT, chat_body("too late", false));
    stand.send(call).await.expect(503);
    assert_eq!(decode.map(|pod| stand.engine(pod).state().running), [1, 1]);
    for stream in streams {
        let answer = stream.await.unwrap().unwrap().expect(200);
        assert!(answer.complete);
        prompt_of(&answer);
    }
    stand.settled(Duration::from_secs(5)).await;
}
