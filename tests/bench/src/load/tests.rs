//! Load against a server of a few lines that plays both engines.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use serde_json::Value;

use super::*;

/// What the server saw, and how it answers decode.
#[derive(Default)]
struct Seen {
    prefills: AtomicU64,
    decodes: AtomicU64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Behaviour {
    Right,
    WrongKv,
    Unavailable,
    Cut,
}

fn serve(stream: TcpStream, seen: &Seen, behaviour: Behaviour) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut length = 0;
        let mut line = String::new();
        loop {
            line.clear();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim().parse().unwrap();
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let body: Value = serde_json::from_slice(&body).unwrap();
        let stream = reader.get_mut();
        if body["kv_transfer_params"]["do_remote_decode"] == true {
            seen.prefills.fetch_add(1, Ordering::Relaxed);
            let answer = r#"{"choices":[],"kv_transfer_params":{"remote_port":7}}"#;
            let length = answer.len();
            write!(
                stream,
                "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{answer}"
            )?;
            continue;
        }
        assert_eq!(body["kv_transfer_params"]["remote_port"], 7);
        seen.decodes.fetch_add(1, Ordering::Relaxed);
        let kv = match behaviour {
            Behaviour::Right => "0123456789abcdef",
            Behaviour::WrongKv => "fedcba9876543210",
            Behaviour::Unavailable => {
                stream.write_all(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")?;
                continue;
            }
            Behaviour::Cut => return Ok(()),
        };
        let event = format!("data: prompt=0123456789abcdef kv={kv} from=-\n\ndata: [DONE]\n\n");
        write!(
            stream,
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{event}\r\n0\r\n\r\n",
            event.len()
        )?;
    }
}

fn server(behaviour: Behaviour) -> (SocketAddr, Arc<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let seen = Arc::new(Seen::default());
    let shared = Arc::clone(&seen);
    // Ends with the test's process.
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let seen = Arc::clone(&shared);
            thread::spawn(move || serve(stream, &seen, behaviour));
        }
    });
    (address, seen)
}

/// Calls `then` with a session of a target that behaves so, and with what its server sees.
fn with_session<T>(behaviour: Behaviour, then: impl FnOnce(Session<'_>, &Seen) -> T) -> T {
    let (address, seen) = server(behaviour);
    let target = Target {
        name: "test",
        route: Route::ByHand {
            prefill: address,
            decode: address,
        },
        process: Process::open(std::process::id()).unwrap(),
    };
    let prompts = [
        Prompt::new("m", 200, true, "h").unwrap(),
        Prompt::new("m", 1 << 20, true, "h").unwrap(),
    ];
    let load = Load {
        target: &target,
        prompts: &prompts,
        counter: &Counter::new(),
        concurrency: 3,
    };
    then(Session::open(load).unwrap(), &seen)
}

#[test]
fn every_request_is_a_prefill_and_a_decode_with_its_parameters() {
    with_session(Behaviour::Right, |mut session, seen| {
        session.slice(Until::Count(20)).unwrap();
        let measured = session.finish().unwrap();
        assert_eq!((measured.errors, measured.requests), (0, 20));
        assert_eq!(seen.prefills.load(Ordering::Relaxed), 20);
        assert_eq!(seen.decodes.load(Ordering::Relaxed), 20);
        assert!(measured.first_byte.p50 > 0.0);
        assert!(measured.total.p99 >= measured.total.p50);
    });
}

#[test]
fn slices_add_up_but_for_what_is_forgotten() {
    let time = Duration::from_millis(100);
    with_session(Behaviour::Right, |mut session, seen| {
        session.slice(Until::Count(10)).unwrap();
        session.forget();
        session.slice(Until::Elapsed(time)).unwrap();
        session.slice(Until::Elapsed(time)).unwrap();
        let measured = session.finish().unwrap();
        assert_eq!(measured.errors, 0);
        assert!(measured.requests > 0);
        assert_eq!(measured.requests + 10, seen.decodes.load(Ordering::Relaxed));
        assert!(measured.seconds >= 2.0 * time.as_secs_f64());
        let rate = measured.requests as f64 / measured.seconds;
        assert!((measured.rps - rate).abs() < 1e-6);
    });
}

#[test]
fn an_event_of_an_idle_connection_counts_nothing() {
    with_session(Behaviour::Right, |mut session, _| {
        session.slice(Until::Count(6)).unwrap();
        let registry = session.poll.registry();
        for (index, client) in session.clients.iter_mut().enumerate() {
            for token in [2 * index, 2 * index + 1] {
                session.run.turn(client, token, registry).unwrap();
            }
        }
        assert_eq!(session.run.in_flight, 0);
        assert_eq!(session.finish().unwrap().requests, 6);
    });
}

#[test]
fn wrong_answers_are_counted_and_end_the_run() {
    for (behaviour, reason) in [
        (Behaviour::WrongKv, "not from the KV of its prompt"),
        (Behaviour::Unavailable, "status 503: busy"),
        (Behaviour::Cut, "closed the connection"),
    ] {
        with_session(behaviour, |mut session, _| {
            session.slice(Until::Count(1000)).unwrap();
            let measured = session.finish().unwrap();
            assert_eq!(measured.requests, 0);
            // The clients in flight when the limit is reached fail as well.
            assert!((MAX_ERRORS..MAX_ERRORS + 3).contains(&measured.errors));
            let first = measured.reasons.first().unwrap();
            assert!(first.contains(reason), "{first}");
        });
    }
}

#[test]
fn answers_must_be_whole() {
    let good = b"{\"t\":\"prompt=0123456789abcdef kv=0123456789abcdef\"}";
    check(good, false).unwrap();
    assert!(check(good, true).is_err());
    assert!(check(b"{\"t\":\"prompt=0123456789abcdef kv=local\"}", false).is_err());
    assert!(check(b"{}", false).is_err());
}
