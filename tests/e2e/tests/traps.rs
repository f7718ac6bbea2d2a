//! A VM that dies takes its own worker's streams with it, and nothing else.

use std::time::{Duration, Instant};

use anyhow::ensure;
use pd_e2e::{Call, Link, Pod, Programs, Stand, chat_body, eventually, within};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread")]
async fn a_trap_on_one_worker_leaves_the_other_alone_and_its_charges_are_given_back() {
    let pods = Pod::pairs(2)
        .into_iter()
        .map(|pod| pod.engine(|engine| engine.token_interval_ms = 400.0));
    let trap = |envoy: &mut pd_e2e::EnvoyConfig| envoy.wasm = Programs::trapping_filter();
    let stand = Stand::builder("trap")
        .pods(pods)
        .envoy(trap)
        .alone()
        .start()
        .await;
    let to = stand.envoy.data();

    // Streams on many connections: the kernel spreads them over both workers.
    let mut lives = Vec::new();
    for n in 0..24 {
        let call = Call::post(CHAT, chat_body(&format!("stream {n}"), true));
        let mut live = call.start(to).await.unwrap();
        assert_eq!(live.status, 200);
        live.next().await.unwrap().expect("a first chunk");
        lives.push(live);
    }
    // The other worker's part is told at its tick.
    within(
        Duration::from_secs(1),
        "24 streams are charged",
        async || {
            let charged = stand.envoy.ledgers().await.unwrap().total;
            (charged.decode_running == 24).then_some(()).ok_or(charged)
        },
    )
    .await;

    let trapping = Call::post(CHAT, chat_body("trap", false)).header("x-pd-test-trap", "1");
    let trapped = trapping.send(to).await.unwrap().expect(503);
    let dead = Instant::now();
    assert!(
        !trapped.header("request-id").is_empty(),
        "{}",
        trapped.shown()
    );

    // Inside the back-off: answered at once everywhere, served on the other worker.
    let (mut served, mut refused) = (0, 0);
    while dead.elapsed() < Duration::from_millis(400) {
        let mut link = Link::open(to).await.unwrap();
        let answer = link.send(Call::get("/readyz")).await.unwrap();
        match answer.status {
            200 => served += 1,
            503 => {
                answer.expect(503);
                refused += 1;
            }
            other => panic!("{other}"),
        }
    }
    println!("in the back-off: {served} served, {refused} refused");
    assert!(served > 0, "the other worker serves");

    let (mut complete, mut cut) = (0, 0);
    for live in lives {
        if live.finish().await.unwrap().complete {
            complete += 1;
        } else {
            cut += 1;
        }
    }
    println!("streams: {complete} complete, {cut} cut");
    assert!(complete > 0, "streams of the other worker go on");
    assert!(cut > 0, "the trap hit a worker with streams");

    // Requests work again on every connection.
    within(Duration::from_secs(5), "both workers serve", || async {
        for n in 0..16 {
            let answer = Call::post(
                CHAT,
                chat_body(&format!("after {n}"), false)
                    .replace("\"max_tokens\":8", "\"max_tokens\":1"),
            );
            let answer = answer
                .send(to)
                .await
                .map_err(|error| format!("{error:#}"))?;
            if answer.status != 200 {
                return Err(answer.shown());
            }
        }
        Ok(())
    })
    .await;
    println!("served everywhere {:?} after the trap", dead.elapsed());
    let took = stand.envoy.settled(Duration::from_secs(10)).await;
    println!("ledger zero after another {took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn charges_of_a_dead_vm_are_given_back_within_five_seconds() {
    let pods = Pod::pairs(1)
        .into_iter()
        .map(|pod| pod.engine(|engine| engine.token_interval_ms = 400.0));
    let trap = |envoy: &mut pd_e2e::EnvoyConfig| {
        envoy.wasm = Programs::trapping_filter();
        // One worker: the dead VM held everything, and only the main thread's VM can notice.
        envoy.concurrency = 1;
    };
    let stand = Stand::builder("given-back")
        .pods(pods)
        .envoy(trap)
        .start()
        .await;
    let mut lives = Vec::new();
    for n in 0..8 {
        let call = Call::post(CHAT, chat_body(&format!("stream {n}"), true));
        let mut live = call.start(stand.envoy.data()).await.unwrap();
        live.next().await.unwrap().expect("a first chunk");
        lives.push(live);
    }
    assert_eq!(stand.envoy.ledgers().await.unwrap().total.decode_running, 8);
    eventually("the VM has told of them", async || {
        let live = stand.envoy.status().await?.live_flows;
        ensure!(live == 8, "{live}");
        Ok(())
    })
    .await;
    let trapping = Call::post(CHAT, chat_body("trap", false)).header("x-pd-test-trap", "1");
    trapping.send(stand.envoy.data()).await.unwrap().expect(503);
    let dead = Instant::now();
    // The control endpoint is on the dead worker too, until its VM is back.
    within(
        Duration::from_secs(5),
        "the charges are given back",
        || async {
            let ledgers = stand
                .envoy
                .ledgers()
                .await
                .map_err(|error| format!("{error:#}"))?;
            if ledgers.total == Default::default() {
                Ok(())
            } else {
                Err(format!("{ledgers:?}"))
            }
        },
    )
    .await;
    println!("given back {:?} after the trap", dead.elapsed());
    eventually("the lost requests are counted", async || {
        let page = stand.envoy.metrics().await?;
        let lost = "gateway_pd_lost_request_total{model=\"\"} 8";
        ensure!(page.lines().any(|line| line == lost), "{page}");
        Ok(())
    })
    .await;
    for live in lives {
        assert!(!live.finish().await.unwrap().complete, "its worker died");
    }
    stand.settled(Duration::from_secs(10)).await;
}
