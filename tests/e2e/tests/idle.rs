//! Engines close idle connections after 5 s; a request that comes just then is not lost.

use std::time::Duration;

use pd_e2e::{Call, MODEL, Pod, Stand, chat_body, prompt_of};

#[tokio::test(flavor = "multi_thread")]
async fn gaps_around_the_engines_idle_limit_lose_nothing_on_either_leg() {
    // A pair of engines per gap, so that no lane keeps another's connections busy.
    let gaps = [4500, 4700, 4900, 4950, 5000, 5050, 5100, 5300, 5500];
    let model = |n: usize| format!("{MODEL}-{n}");
    let pods = (0..gaps.len()).flat_map(|n| {
        let set = format!("r{n}");
        [
            Pod::prefill(&set).model(&model(n)),
            Pod::decode(&set).model(&model(n)),
        ]
    });
    // One worker, or the next request would start with a connection of the other's.
    let one = |envoy: &mut pd_e2e::EnvoyConfig| envoy.concurrency = 1;
    let stand = Stand::builder("idle").pods(pods).envoy(one).start().await;
    let to = stand.envoy.data();
    let lanes: Vec<_> = gaps
        .into_iter()
        .enumerate()
        .map(|(n, gap)| {
            let model = model(n);
            tokio::spawn(async move {
                for round in 0..4 {
                    let body =
                        chat_body(&format!("{gap} {round}"), round % 2 == 0).replace(MODEL, &model);
                    let answer = Call::post("/v1/chat/completions", body)
                        .send(to)
                        .await
                        .unwrap();
                    assert_eq!(answer.status, 200, "gap {gap}: {}", answer.shown());
                    assert!(answer.complete, "gap {gap}");
                    prompt_of(&answer);
                    tokio::time::sleep(Duration::from_millis(gap)).await;
                }
            })
        })
        .collect();
    for lane in lanes {
        lane.await.unwrap();
    }
    println!("{} requests, none lost", gaps.len() * 4);
    stand.settled(Duration::from_secs(5)).await;
}
