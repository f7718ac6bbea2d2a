//! Rooms in which the two legs of a request meet, kept by the prefill engine.
//!
//! A leg enters the room of its request's number, whichever comes first. The prefill leg computes
//! once the decode leg is there too, and is done when that has taken the KV. A decode leg is a
//! visit over the side channel that stays open meanwhile: when it breaks, its engine or its client
//! is gone. A leg that leaves before the KV was taken fails the other one.
//! Invariant: a room is open while a leg is in it, and has at most one leg of each kind.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::channel::{CallError, Channel};
use crate::core::Count;
use crate::kv::Content;
use crate::reply::{Reply, json_of};
use crate::state::RoomState;

/// Path of a visit.
pub(crate) const JOIN: &str = "/sim/side-channel/join";

/// All rooms of an engine.
#[derive(Default)]
pub(crate) struct Rooms {
    open: Mutex<HashMap<u64, Arc<Room>>>,
    visiting: Count,
    holding: Count,
    met: Count,
    done: Count,
    failed: Count,
    timed_out: Count,
    duplicate: Count,
}

struct Room(watch::Sender<Stage>);

/// How far the legs of a room are.
#[derive(Clone, Default)]
struct Stage {
    prefill: bool,
    decode: bool,
    kv: Option<Content>,
    taken: bool,
    failed: Option<Arc<str>>,
}

/// A leg of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    Prefill,
    Decode,
}

/// A leg in its room; dropping it leaves.
pub(crate) struct Seat {
    rooms: Arc<Rooms>,
    id: u64,
    leg: Leg,
    room: Arc<Room>,
    holding: bool,
}

/// Why nothing came of a room.
pub(crate) type Reason = Arc<str>;

/// A visit's message.
#[derive(Serialize, Deserialize)]
pub(crate) struct Join {
    /// Number of the room.
    pub(crate) room: u64,
    /// The process that is meant, where the protocol names one.
    pub(crate) instance: Option<String>,
    /// Time the KV takes on its way.
    pub(crate) transfer_ms: u64,
}

#[derive(Serialize, Deserialize)]
struct Joined {
    content: Content,
}

#[derive(Serialize, Deserialize)]
struct Turned {
    reason: String,
}

/// Why a visit brought no KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VisitError {
    /// Nobody listens there.
    Unreachable,
    /// The engine went away.
    Lost,
    /// The room says no.
    Failed(String),
}

// === impl Rooms ===

impl Rooms {
    /// Takes a leg's seat; `None` when such a leg is there already.
    pub(crate) fn enter(self: &Arc<Self>, id: u64, leg: Leg) -> Option<Seat> {
        let mut open = self.lock();
        let room = match open.entry(id) {
            Entry::Occupied(room) => Arc::clone(room.get()),
            Entry::Vacant(place) => {
                let room = Arc::new(Room(watch::Sender::new(Stage::default())));
                Arc::clone(place.insert(room))
            }
        };
        let mut entered = false;
        room.0.send_modify(|stage| {
            let (own, other) = match leg {
                Leg::Prefill => (&mut stage.prefill, stage.decode),
                Leg::Decode => (&mut stage.decode, stage.prefill),
            };
            entered = !std::mem::replace(own, true);
            if entered && other {
                self.met.up();
            }
        });
        drop(open);
        if !entered {
            self.duplicate.up();
            return None;
        }
        Some(Seat {
            rooms: Arc::clone(self),
            id,
            leg,
            room,
            holding: false,
        })
    }

    /// As a decode engine: enters the room of another engine and comes back with its KV.
    pub(crate) async fn visit(
        &self,
        channel: &Channel,
        host: &str,
        port: u16,
        join: &Join,
    ) -> Result<Content, VisitError> {
        let _visiting = self.visiting.within();
        let answer = channel.call(host, port, JOIN, join).await;
        let (status, body) = answer.map_err(|error| match error {
            CallError::Unreachable => VisitError::Unreachable,
            CallError::Broken => VisitError::Lost,
        })?;
        if status == StatusCode::OK {
            let joined = serde_json::from_slice::<Joined>(&body);
            return joined.map(|j| j.content).map_err(|_| VisitError::Lost);
        }
        // Something else that speaks HTTP is no bootstrap server either.
        let turned = serde_json::from_slice::<Turned>(&body);
        Err(turned.map_or(VisitError::Unreachable, |t| VisitError::Failed(t.reason)))
    }

    /// As the prefill engine: a visit, which lasts until the KV is taken. `instance` is the
    /// process a visitor may have to mean.
    pub(crate) async fn receive(
        self: &Arc<Self>,
        body: &[u8],
        instance: Option<&str>,
    ) -> Response<Reply> {
        let Ok(join) = serde_json::from_slice::<Join>(body) else {
            return json_of(StatusCode::BAD_REQUEST, &());
        };
        if join.instance.as_deref() != instance {
            // Whoever calls an earlier process gets no answer.
            return std::future::pending().await;
        }
        let Some(mut seat) = self.enter(join.room, Leg::Decode) else {
            // Nobody will come for this one: the visitor gives up in the end.
            return std::future::pending().await;
        };
        match seat.fetch(Duration::from_millis(join.transfer_ms)).await {
            Ok(content) => json_of(StatusCode::OK, &Joined { content }),
            Err(reason) => {
                let reason = reason.to_string();
                json_of(StatusCode::CONFLICT, &Turned { reason })
            }
        }
    }

    /// A leg waited in vain.
    pub(crate) fn timed_out(&self) {
        self.timed_out.up();
    }

    /// What is open and was counted.
    pub(crate) fn state(&self) -> RoomState {
        RoomState {
            rooms_open: self.open(),
            rooms_met: self.met.get(),
            rooms_done: self.done.get(),
            rooms_failed: self.failed.get(),
            rooms_timed_out: self.timed_out.get(),
            rooms_duplicate: self.duplicate.get(),
        }
    }

    /// Rooms with a leg in them, and visits of this engine elsewhere.
    pub(crate) fn open(&self) -> u64 {
        (self.lock().len() as u64).saturating_add(self.visiting.get())
    }

    /// Rooms whose KV is computed and not yet taken.
    pub(crate) fn holding(&self) -> u64 {
        self.holding.get()
    }

    /// Zeroes the counts.
    pub(crate) fn reset(&self) {
        for count in [
            &self.met,
            &self.done,
            &self.failed,
            &self.timed_out,
            &self.duplicate,
        ] {
            count.reset();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Room>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Seat ===

impl Seat {
    /// The other leg came.
    pub(crate) async fn met(&self) -> Result<(), Reason> {
        self.wait(|stage| (stage.prefill && stage.decode).then_some(()))
            .await
    }

    /// The prefill leg: the KV is there.
    pub(crate) fn ready(&mut self, content: Content) {
        self.holding = true;
        self.rooms.holding.up();
        self.room.0.send_modify(|stage| stage.kv = Some(content));
    }

    /// The prefill leg: the KV was taken.
    pub(crate) async fn taken(&self) -> Result<(), Reason> {
        self.wait(|stage| stage.taken.then_some(())).await
    }

    /// The decode leg: waits for the KV and takes it.
    async fn fetch(&mut self, transfer: Duration) -> Result<Content, Reason> {
        let content = self.wait(|stage| stage.kv).await?;
        if !transfer.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(transfer) => {}
                left = self.wait(|_| None::<()>) => {
                    // Ends with a failure only.
                    left?;
                }
            }
        }
        self.room.0.send_modify(|stage| stage.taken = true);
        self.rooms.done.up();
        Ok(content)
    }

    async fn wait<T>(&self, done: impl Fn(&Stage) -> Option<T>) -> Result<T, Reason> {
        let mut stages = self.room.0.subscribe();
        loop {
            {
                let stage = stages.borrow_and_update();
                if let Some(reason) = &stage.failed {
                    return Err(Arc::clone(reason));
                }
                if let Some(result) = done(&stage) {
                    return Ok(result);
                }
            }
            // The seat holds the sender.
            if stages.changed().await.is_err() {
                return Err(Arc::from("the room is closed"));
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if self.holding {
            self.rooms.holding.down();
        }
        let mut open = self.rooms.lock();
        let mut empty = false;
        self.room.0.send_modify(|stage| {
            match self.leg {
                Leg::Prefill => stage.prefill = false,
                Leg::Decode => stage.decode = false,
            }
            if !stage.taken && stage.failed.is_none() {
                self.rooms.failed.up();
                stage.failed = Some(Arc::from(match self.leg {
                    Leg::Prefill => "the prefill request was aborted",
                    Leg::Decode => "the decode request was aborted",
                }));
            }
            empty = !stage.prefill && !stage.decode;
        });
        // A later request may have opened the room anew by now.
        let own = open
            .get(&self.id)
            .is_some_and(|room| Arc::ptr_eq(room, &self.room));
        if empty && own {
            open.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[tokio::test]
    async fn legs_meet_whoever_comes_first_and_leave_nothing() {
        for decode_first in [false, true] {
            let rooms = Arc::new(Rooms::default());
            let order = if decode_first {
                [Leg::Decode, Leg::Prefill]
            } else {
                [Leg::Prefill, Leg::Decode]
            };
            let mut seats = order.map(|leg| rooms.enter(7, leg).unwrap());
            seats.sort_by_key(|seat| seat.leg == Leg::Decode);
            let [mut prefill, mut decode] = seats;
            prefill.met().await.unwrap();
            prefill.ready(Some(9));
            assert_eq!((rooms.holding(), rooms.open()), (1, 1));
            assert_eq!(decode.fetch(NOW).await.unwrap(), Some(9));
            prefill.taken().await.unwrap();
            drop((prefill, decode));
            let state = rooms.state();
            assert_eq!((rooms.holding(), state.rooms_open), (0, 0));
            assert_eq!((state.rooms_met, state.rooms_done), (1, 1));
            assert_eq!(state.rooms_failed, 0);
        }
    }

    #[tokio::test]
    async fn a_leg_that_leaves_fails_the_other_and_the_room_can_be_used_again() {
        let rooms = Arc::new(Rooms::default());
        let mut decode = rooms.enter(7, Leg::Decode).unwrap();
        let prefill = rooms.enter(7, Leg::Prefill).unwrap();
        assert!(rooms.enter(7, Leg::Prefill).is_none());
        drop(prefill);
        let reason = decode.fetch(NOW).await.unwrap_err();
        assert_eq!(&*reason, "the prefill request was aborted");
        drop(decode);
        let state = rooms.state();
        assert_eq!((state.rooms_open, state.rooms_failed), (0, 1));
        assert_eq!(state.rooms_duplicate, 1);
        let prefill = rooms.enter(7, Leg::Prefill).unwrap();
        let _decode = rooms.enter(7, Leg::Decode).unwrap();
        prefill.met().await.unwrap();
    }
}
