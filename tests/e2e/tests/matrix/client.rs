//! The client of a cell: it stays for its answer, or leaves at a moment.

use std::time::{Duration, Instant};

use pd_e2e::{Answer, Call, Live, until};
use pd_engine_sim::State;
use pd_failure_matrix::{Fault, LEAVES_AFTER_MS, Leg, Moment};
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::setting::{Cast, DECODE, OTHER_PREFILL, PREFILL};

/// How long the moment a client leaves at may take to come.
const COMES: Duration = Duration::from_secs(5);

/// What a client got, and when from its request.
pub(super) struct Seen {
    pub(super) got: Got,
    pub(super) ms: u64,
}

pub(super) enum Got {
    /// An answer, perhaps cut.
    Answer(Box<Answer>),
    /// The connection ended without one.
    Nothing(String),
    /// It left before there was one.
    Left,
    /// The cell did not come to its moment.
    Missed(String),
}

impl Cast<'_> {
    /// Plays the client's part.
    pub(super) async fn play(&self) -> Seen {
        let started = Instant::now();
        let (leg, moment, fault) = (self.cell.leg, self.cell.moment, self.cell.fault);
        let got = match (leg, moment, fault) {
            (Leg::Client, Moment::Uploading, _) => self.leave_upload().await,
            (Leg::Client, Moment::Body, _) => self.leave_body().await,
            (Leg::Client, ..) => self.leave().await,
            (Leg::Decode, Moment::Body, Fault::Dies) => self.outlive_decode().await,
            (Leg::Abort, _, Fault::Refused) => self.deafen_decode().await,
            _ => Ok(got(self.call().send(self.to()).await)),
        };
        let got = got.unwrap_or_else(Got::Missed);
        let took = match &got {
            Got::Answer(answer) => answer.total,
            _ => started.elapsed(),
        };
        let ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        Seen { got, ms }
    }

    fn to(&self) -> std::net::SocketAddr {
        self.stand.envoy.data()
    }

    fn call(&self) -> Call {
        Call::post(self.cell.path(), self.cell.body())
    }

    /// Sends the half of a body and leaves.
    async fn leave_upload(&self) -> Result<Got, String> {
        let body = self.cell.body();
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: gateway.test\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.cell.path(),
            body.len()
        );
        let half = body.get(..body.len() / 2).unwrap_or_default();
        let upload = async {
            let mut socket = TcpStream::connect(self.to()).await?;
            socket.write_all((head + half).as_bytes()).await?;
            std::io::Result::Ok(socket)
        };
        let socket = upload.await.map_err(|error| error.to_string())?;
        linger().await;
        drop(socket);
        Ok(Got::Left)
    }

    /// Leaves in the middle of the answer.
    async fn leave_body(&self) -> Result<Got, String> {
        let live = self.call().start(self.to()).await;
        let mut live = live.map_err(|error| format!("no answer: {error:#}"))?;
        self.read_part(&mut live).await?;
        linger().await;
        drop(live);
        Ok(Got::Left)
    }

    /// Leaves before there is an answer.
    async fn leave(&self) -> Result<Got, String> {
        let request = tokio::spawn(self.call().send(self.to()));
        let came = until(COMES, || async { self.moment_came() }).await;
        linger().await;
        if request.is_finished() {
            let early = request.await.map_err(|error| error.to_string())?;
            return Err(match early {
                Ok(answer) => format!("answered before it left: {}", answer.shown()),
                Err(error) => format!("cut before it left: {error:#}"),
            });
        }
        request.abort();
        // Its connection is closed when it is gone.
        let _ = request.await;
        came.map(|()| Got::Left)
    }

    /// Whether the request is where its client leaves it.
    fn moment_came(&self) -> Result<(), String> {
        let has_leg = |pod: &str| {
            let log = self.engine(pod).log();
            log.iter().any(|record| record.leg.is_some())
        };
        let together = self.cell.engine.is_together();
        let (prefill, decode) = (self.engine(PREFILL).state(), self.engine(DECODE).state());
        let came = match self.cell.moment {
            Moment::Asking => {
                let log = self.engine(PREFILL).log();
                log.iter().any(|record| record.path == "/server_info")
            }
            Moment::Prefilling => has_leg(PREFILL) && (!together || has_leg(DECODE)),
            Moment::Retrying => has_leg(OTHER_PREFILL),
            Moment::Decoding => has_leg(DECODE) && (!together || is_done(&prefill)),
            Moment::Headers | Moment::Role => decode.kv.pulled == 1,
            Moment::Uploading | Moment::Body => true,
        };
        if came {
            return Ok(());
        }
        Err(format!(
            "its moment did not come: {prefill:?} and {decode:?}"
        ))
    }

    /// Has the decode engine die when a part of its answer has come.
    async fn outlive_decode(&self) -> Result<Got, String> {
        let mut live = match self.call().start(self.to()).await {
            Ok(live) => live,
            Err(error) => return Ok(Got::Nothing(format!("{error:#}"))),
        };
        self.read_part(&mut live).await?;
        self.engine(DECODE).kill("the cell's fault");
        Ok(got(live.finish().await))
    }

    /// Has the decode pod stop listening when it has its leg.
    async fn deafen_decode(&self) -> Result<Got, String> {
        let request = tokio::spawn(self.call().send(self.to()));
        let has_leg = until(COMES, || async {
            let arrived = self.engine(DECODE).state().requests_total;
            if arrived == 1 { Ok(()) } else { Err(arrived) }
        });
        has_leg
            .await
            .map_err(|arrived| format!("{arrived} decode legs"))?;
        self.engine(DECODE).refuse(true);
        Ok(got(request.await.map_err(|error| error.to_string())?))
    }

    /// Reads two content chunks, or the begin of an answer that is not streamed.
    async fn read_part(&self, live: &mut Live) -> Result<(), String> {
        let mut text = String::new();
        loop {
            let piece = live.next().await.map_err(|error| format!("{error:#}"))?;
            let piece = piece.ok_or_else(|| format!("all there is: {text}"))?;
            text.push_str(&String::from_utf8_lossy(&piece.bytes));
            let enough = if self.cell.stream {
                text.split("\n\n").filter(|event| has_text(event)).count() >= 2
            } else {
                !text.is_empty()
            };
            if enough {
                return Ok(());
            }
        }
    }
}

fn got(result: anyhow::Result<Answer>) -> Got {
    match result {
        Ok(answer) => Got::Answer(Box::new(answer)),
        Err(error) => Got::Nothing(format!("{error:#}")),
    }
}

/// Every leg that reached the prefill engine is over.
fn is_done(prefill: &State) -> bool {
    prefill.requests_total > 0 && prefill.running + prefill.waiting == 0
}

/// Whether an event of a stream carries generated text.
fn has_text(event: &str) -> bool {
    let data = event.strip_prefix("data: ").unwrap_or_default();
    let event: Value = serde_json::from_str(data).unwrap_or_default();
    let choice = &event["choices"][0];
    [&choice["delta"]["content"], &choice["text"]]
        .iter()
        .any(|text| text.as_str().is_some_and(|text| !text.is_empty()))
}

/// The time between a moment and the client that leaves at it; nothing else marks its end.
async fn linger() {
    tokio::time::sleep(Duration::from_millis(LEAVES_AFTER_MS)).await;
}
