//! The decode timers on a real Envoy: each in time, none on a healthy stream, many at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::ensure;
use pd_e2e::{Answer, Call, Link, Pod, Stand, chat_body, eventually, prompt_of};
use pd_engine_sim::{EngineKind, Fault, FaultKind, On};
use serde_json::json;

/// How much later than its limit a timer may fire: a tick and 250 ms.
const LATE: Duration = Duration::from_millis(350);
/// How long Envoy keeps an HTTP/1 connection open after it has cut a response: its
/// `delayed_close_timeout`. The engine's leg ends before that.
const HTTP1_CLOSE: Duration = Duration::from_millis(100);
const STALL_BEFORE_HEADERS: FaultKind = FaultKind::StallBeforeHeaders {
    ms: None,
    after_work: false,
};

fn stall_after(after_chunks: u32) -> FaultKind {
    FaultKind::StallMidStream {
        after_chunks,
        ms: None,
    }
}

async fn chat(stand: &Stand, stream: bool) -> Answer {
    let call = Call::post("/v1/chat/completions", chat_body("silent", stream));
    stand.send(call).await
}

/// One pair with these settings, whose decode engine falls silent once.
async fn silent(name: &str, plugin: &serde_json::Value, kind: FaultKind) -> Stand {
    let stand = Stand::builder(name)
        .pods(Pod::pairs(1))
        .plugin(plugin)
        .start()
        .await;
    let fault = Fault::next(1, On::Decode, kind);
    assert!(stand.engine("decode-r0").inject(fault));
    stand
}

/// Asserts that it took `limit`, and not much longer.
fn assert_took(took: Duration, limit: Duration) {
    println!("{limit:?}: {took:?}");
    assert!(took >= limit, "early: {took:?}");
    assert!(took <= limit + LATE, "late: {took:?}");
}

/// Asserts that this timer ended one request, and that nothing is left of it.
async fn assert_counted(stand: &Stand, phase: &str) {
    eventually("the watchdog is counted", || async {
        let page = stand.envoy.metrics().await?;
        let value = |name: &str, labels: &[&str]| {
            page.lines()
                .filter(|line| line.contains(name) && labels.iter().all(|l| line.contains(l)))
                .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
                .sum::<f64>()
        };
        let phase = format!("phase=\"{phase}\"");
        let fired = value("gateway_pd_decode_watchdog_total", &[&phase]);
        let labels = ["status=\"pd_decode_watchdog\"", "status_code=\"504\""];
        let failed = value("gateway_request_model_fail_total", &labels);
        let succeeded = value("gateway_request_model_success_total", &[]);
        let counts = (fired, failed, succeeded);
        ensure!(counts == (1.0, 1.0, 0.0), "{counts:?}");
        Ok(())
    })
    .await;
    stand.envoy.settled(Duration::from_secs(5)).await;
    eventually("the engine let go", || async {
        let running = stand.engine("decode-r0").state().running;
        if running == 0 { Ok(()) } else { Err(running) }
    })
    .await;
}

fn assert_504(answer: Answer, says: &str) {
    let answer = answer.expect(504);
    assert_eq!(answer.header("x-error-pd-decode"), "true");
    assert!(!answer.header("request-id").is_empty());
    assert_eq!(answer.json()["error"]["message"], says);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_without_a_first_chunk_is_a_504_also_after_held_headers() {
    for (name, kind) in [
        ("no-headers", STALL_BEFORE_HEADERS),
        // Headers and the role, which are held until there is content.
        ("no-content", stall_after(0)),
    ] {
        let held = name == "no-content";
        let plugin = json!({ "decodeFirstResponseTimeout": 1.2, "decodeStreamIdleTimeout": 1.2 });
        let stand = silent(name, &plugin, kind).await;
        let answer = chat(&stand, true).await;
        assert_took(answer.total, Duration::from_millis(1200));
        let (what, phase) = if held {
            ("go on", "stream_idle")
        } else {
            ("start", "first_response")
        };
        let says = format!("decode pod decode-r0 did not {what} responding within 1.2 s");
        assert_504(answer, &says);
        assert_counted(&stand, phase).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_not_streamed_and_does_not_end_is_a_504() {
    let plugin = json!({ "decodeResponseTimeout": 0.8 });
    let stand = silent("no-answer", &plugin, STALL_BEFORE_HEADERS).await;
    let answer = chat(&stand, false).await;
    assert_took(answer.total, Duration::from_millis(800));
    let says = "decode pod decode-r0 did not finish responding within 0.8 s";
    assert_504(answer, says);
    assert_counted(&stand, "first_response").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_begun_stream_that_stands_still_is_cut() {
    let plugin = json!({ "decodeStreamIdleTimeout": 0.9 });
    let limit = Duration::from_millis(900);
    let stand = silent("stands-still", &plugin, stall_after(3)).await;
    let call = Call::post("/v1/chat/completions", chat_body("silent", true));
    let mut live = call.start(stand.envoy.data()).await.unwrap();
    let mut seen = String::new();
    while seen.matches("\"content\":").count() < 4 {
        let piece = live
            .next()
            .await
            .unwrap()
            .expect("the role and three chunks");
        seen.push_str(&String::from_utf8_lossy(&piece.bytes));
    }
    let last = Instant::now();
    eventually("the engine sees the leg cut", || async {
        let state = stand.engine("decode-r0").state();
        if state.running == 0 {
            Ok(())
        } else {
            Err(state.running)
        }
    })
    .await;
    // Looked at every 25 ms.
    assert_took(last.elapsed(), limit);
    assert!(live.next().await.is_err(), "cut, not ended");
    let took = last.elapsed();
    assert!(took <= limit + LATE + HTTP1_CLOSE, "{took:?}");
    assert_counted(&stand, "stream_idle").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn seventy_seconds_of_healthy_and_of_slow_streams_under_timers_of_twenty_are_never_cut() {
    let paced = |pod: Pod, interval: f64, tokens: u32| {
        pod.engine(|engine| {
            engine.tokens = tokens;
            engine.token_interval_ms = interval;
            engine.transfer_delay_ms = 300.0;
        })
    };
    let plugin = json!({
        "decodeFirstResponseTimeout": 20, "decodeStreamIdleTimeout": 20, "decodeResponseTimeout": 0
    });
    let mut runs = Vec::new();
    for (name, interval, tokens) in [("healthy-70", 500.0, 141), ("slow-70", 19_500.0, 5)] {
        let stand = Stand::builder(name)
            .pods(
                Pod::pairs(1)
                    .into_iter()
                    .map(|pod| paced(pod, interval, tokens)),
            )
            .plugin(&plugin);
        runs.push(tokio::spawn(async move {
            let stand = stand.start().await;
            let limit = format!("\"max_tokens\":{tokens}");
            let body = chat_body("long", true).replace("\"max_tokens\":8", &limit);
            let call = Call::post("/v1/chat/completions", body);
            let live = call.start(stand.envoy.data()).await.unwrap();
            let answer = live.finish().await.unwrap().expect(200);
            println!("{interval} ms: {:?}", answer.total);
            assert!(answer.complete, "cut after {:?}", answer.total);
            assert!(answer.total > Duration::from_secs(69), "{:?}", answer.total);
            prompt_of(&answer);
            stand.settled(Duration::from_secs(5)).await;
        }));
    }
    for run in runs {
        run.await.unwrap();
    }
}

/// What a worker takes for a request it answers by itself, asked again and again: when each
/// answer came and how long it took.
type Beats = Vec<(Instant, Duration)>;

/// Asks from a thread of its own until told to stop.
fn ask_all_the_time(
    to: std::net::SocketAddr,
    stop: &Arc<AtomicBool>,
) -> std::thread::JoinHandle<Beats> {
    let stop = Arc::clone(stop);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut link = Link::open(to).await.unwrap();
            let mut beats = Beats::new();
            while !stop.load(Ordering::Relaxed) {
                let asked = Instant::now();
                link.send(Call::get("/v1/models"))
                    .await
                    .unwrap()
                    .expect(200);
                beats.push((asked, asked.elapsed()));
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            beats
        })
    })
}

/// Lets 200 watchdogs of one worker come due in one tick. Returns how long the worker's longest
/// answer took meanwhile.
async fn due_at_once(stand: &Stand) -> Duration {
    const COUNT: usize = 200;
    let decode = stand.engine("decode-r0");
    assert!(decode.inject(Fault::next(COUNT as u64, On::Decode, stall_after(1))));
    let ends = Arc::new(Mutex::new(Vec::new()));
    let mut clients = Vec::new();
    for _ in 0..COUNT {
        let (to, ends) = (stand.envoy.data(), Arc::clone(&ends));
        clients.push(tokio::spawn(async move {
            let call = Call::post("/v1/chat/completions", chat_body("silent", true));
            let answer = call.send(to).await.unwrap();
            ends.lock().unwrap().push(Instant::now());
            assert_eq!((answer.status, answer.complete), (200, false));
        }));
    }
    eventually("all are at the engine", || async {
        let running = decode.state().running;
        if running == COUNT as u64 {
            Ok(())
        } else {
            Err(running)
        }
    })
    .await;
    // The first chunks of all of them reach the worker at the same time.
    stand.envoy.signal("STOP").unwrap();
    tokio::time::sleep(Duration::from_secs(4)).await;
    stand.envoy.signal("CONT").unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let asking = ask_all_the_time(stand.envoy.data(), &stop);
    for client in clients {
        client.await.unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    let beats = asking.join().unwrap();
    let ends = ends.lock().unwrap().clone();
    let (first, last) = (ends.iter().min().unwrap(), ends.iter().max().unwrap());
    let spread = *last - *first;
    assert!(spread < Duration::from_millis(300), "{spread:?}");
    let around = |(asked, took): &(Instant, Duration)| {
        *asked + *took + HTTP1_CLOSE + LATE >= *first && *asked <= *last
    };
    let meanwhile = beats.iter().filter(|beat| around(beat));
    let longest = meanwhile.map(|(_, took)| *took).max().unwrap();
    let mut all: Vec<Duration> = beats.iter().map(|(_, took)| *took).collect();
    all.sort_unstable();
    println!(
        "{COUNT} watchdogs within {spread:?}: longest answer {longest:?}, median {:?}",
        all[all.len() / 2]
    );
    longest
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_watchdogs_in_one_tick_hold_nobody_up() {
    // SGLang is told to drop each of the requests; the other engine sees its connection end.
    for engine in [EngineKind::Vllm, EngineKind::Sglang] {
        let pods = Pod::pairs(1).into_iter().map(|pod| {
            pod.of_engine(engine)
                .engine(|engine| engine.transfer_delay_ms = 3000.0)
        });
        let stand = Stand::builder("at-once")
            .pods(pods)
            .plugin(&json!({ "decodeStreamIdleTimeout": 2, "ejectAfterFailures": 0 }))
            .envoy(|envoy| envoy.concurrency = 1)
            .alone()
            .start()
            .await;
        // What else the machine does only adds to it, so the best of three is the worker's own.
        let mut best = Duration::MAX;
        for _ in 0..3 {
            best = best.min(due_at_once(&stand).await);
            stand.settled(Duration::from_secs(10)).await;
            if best < Duration::from_millis(20) {
                break;
            }
        }
        println!("{engine:?}: 200 watchdogs hold the worker up by at most {best:?}");
        assert!(best < Duration::from_millis(20), "{best:?}");
        if engine == EngineKind::Sglang {
            let calls = stand.engine("decode-r0").state().aborts.abort_calls;
            assert!(calls >= 200, "{calls}");
        }
    }
}
