//! Pushed tokenizers in the store, under keys and layouts that old and new filters share.
//!
//! `pd.tokenizer.index` is: version `u8`, then the entries (postcard). `pd.tokenizer.{n}` is: the
//! digest of the file `u64` little endian, then the file as it was pushed. The index is written
//! first: a reader that finds another digest than the index names looks again later.

use crate::fleet::snapshot::Origin;
use crate::fleet::{PushStatus, Refusal};
use crate::port::{SharedStore, StoreError, Stored};
use crate::{FORMAT, OTHER_FORMAT};
use pd_wire::control::PushReply;
use pd_wire::tokenizer::{MAX_TOKENIZERS, Message, MessageError, TokenizerFile, digest};
use pd_wire::topology::Stamp;
use serde::{Deserialize, Serialize};

/// Key of the index.
pub const KEY_INDEX: &str = "pd.tokenizer.index";
/// Most tries of one compare-and-swap.
const MAX_TRIES: u32 = 8;

/// One tokenizer held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Model it counts for.
    pub model: String,
    /// Number of its key.
    pub slot: u8,
    /// Identity of the file.
    pub digest: u64,
    /// Size of the file, in bytes.
    pub bytes: u64,
    /// Who sent it, and when it was stored.
    pub origin: Origin,
}

/// Takes a pushed tokenizer over into the store; whether it can be built shows when a VM needs
/// it. What is held already is not written again.
///
/// # Errors
/// [`Refusal`] with the status to answer; what is held stays whole.
pub fn accept_tokenizer<S: SharedStore + ?Sized>(
    store: &S,
    bytes: &[u8],
    now_ms: u64,
) -> Result<PushReply, Refusal> {
    let message = Message::parse(bytes).map_err(|error| {
        let status = match error {
            MessageError::TooLarge { .. } => PushStatus::TooLarge,
            MessageError::Version { .. } => PushStatus::UnknownVersion,
            MessageError::Malformed(_) => PushStatus::BadRequest,
        };
        refusal(status, error.to_string(), None)
    })?;
    TokenizerFile::parse(&message.file)
        .map_err(|error| refusal(PushStatus::BadRequest, error.to_string(), None))?;
    let digest = digest(&message.file);
    for _ in 0..MAX_TRIES {
        let index = store.get(KEY_INDEX);
        let mut entries = read(index.as_ref());
        let held = entries.iter().find(|entry| entry.model == message.model);
        let slot = match held {
            Some(held) if held.digest == digest => held.slot,
            Some(held) if !message.stamp.replaces(&held.origin.stamp()) => {
                let error = not_newer(&message.stamp, &held.origin);
                return Err(refusal(PushStatus::Conflict, error, Some(held)));
            }
            Some(held) => held.slot,
            None => free_slot(&entries, &message.stamp)
                .ok_or_else(|| refusal(PushStatus::TooLarge, full(), None))?,
        };
        let file = store.get(&key(slot));
        let stored = held.filter(|held| held.digest == digest).cloned();
        let is_indexed = stored.is_some();
        let entry = stored.unwrap_or_else(|| Entry {
            model: message.model.clone(),
            slot,
            digest,
            bytes: u64::try_from(message.file.len()).unwrap_or(u64::MAX),
            origin: Origin::of(&message.stamp, now_ms),
        });
        if !is_indexed {
            entries.retain(|other| other.slot != slot);
            entries.push(entry.clone());
            match store.replace(KEY_INDEX, index.as_ref(), &encode(&entries)) {
                Ok(()) => {}
                Err(StoreError::Raced) => continue,
                Err(StoreError::Refused) => break,
            }
        }
        if file_of(file.as_ref(), digest).is_some() {
            return Ok(reply(Some(&entry), String::new()));
        }
        let mut contents = digest.to_le_bytes().to_vec();
        contents.extend_from_slice(&message.file);
        match store.replace(&key(slot), file.as_ref(), &contents) {
            Ok(()) => return Ok(reply(Some(&entry), String::new())),
            // Another push got in between; whether it replaced this one, the index tells.
            Err(StoreError::Raced) => {}
            Err(StoreError::Refused) => break,
        }
    }
    let error = "the shared store did not take the tokenizer: push it again".to_owned();
    Err(refusal(PushStatus::Unavailable, error, None))
}

/// The entries of a stored index; none when it is of an unknown version or damaged.
pub fn read(index: Option<&Stored>) -> Vec<Entry> {
    let entries = index
        .and_then(|stored| stored.bytes.split_first())
        .filter(|(version, _)| **version == FORMAT || **version == OTHER_FORMAT)
        .and_then(|(_, entries)| postcard::from_bytes(entries).ok());
    entries.unwrap_or_default()
}

/// The file of an entry; `None` while the store holds another one.
pub fn file_of(stored: Option<&Stored>, digest: u64) -> Option<&[u8]> {
    let (head, file) = stored?.bytes.split_first_chunk::<8>()?;
    (*head == digest.to_le_bytes()).then_some(file)
}

/// Key of a file.
pub fn key(slot: u8) -> String {
    format!("pd.tokenizer.{slot}")
}

/// The lowest unused slot, else that of a tokenizer which an earlier life of an agent left.
fn free_slot(entries: &[Entry], stamp: &Stamp) -> Option<u8> {
    let slots = 0..u8::try_from(MAX_TOKENIZERS).unwrap_or(u8::MAX);
    let is_used = |slot: &u8| entries.iter().any(|entry| entry.slot == *slot);
    slots.into_iter().find(|slot| !is_used(slot)).or_else(|| {
        let left = entries.iter().filter(|it| it.origin.epoch < stamp.epoch);
        left.min_by_key(|it| (it.origin.epoch, it.origin.sequence))
            .map(|entry| entry.slot)
    })
}

fn encode(entries: &[Entry]) -> Vec<u8> {
    let mut out = vec![FORMAT];
    out.extend(postcard::to_allocvec(entries).unwrap_or_default());
    out
}

fn full() -> String {
    format!("{MAX_TOKENIZERS} tokenizers are held, and there is no room for another one")
}

fn not_newer(stamp: &Stamp, held: &Origin) -> String {
    format!(
        "epoch {} sequence {} of agent {} does not replace epoch {} sequence {} of agent {}: \
         continue with a higher epoch",
        stamp.epoch, stamp.sequence, stamp.agent, held.epoch, held.sequence, held.agent
    )
}

fn refusal(status: PushStatus, error: String, held: Option<&Entry>) -> Refusal {
    Refusal {
        status,
        reply: reply(held, error),
    }
}

fn reply(held: Option<&Entry>, error: String) -> PushReply {
    let origin = held.map(|entry| entry.origin.clone()).unwrap_or_default();
    PushReply {
        error,
        epoch: origin.epoch,
        sequence: origin.sequence,
        topology_sequence: 0,
        agent: origin.agent,
    }
}

#[cfg(test)]
mod tests;
