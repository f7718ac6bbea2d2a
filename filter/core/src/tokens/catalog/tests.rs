use super::*;
use crate::testkit::MemoryStore;
use pd_wire::topology::{MAX_MESSAGE, WIRE_VERSION};
use std::borrow::Cow;

/// A tokenizer that differs from others by one token.
fn file(token: &str) -> Vec<u8> {
    format!(r#"{{"model":{{"type":"BPE","vocab":{{"{token}":0}},"merges":[]}}}}"#).into_bytes()
}

fn message(agent: &str, epoch: u64, sequence: u64, model: &str, file: &[u8]) -> Vec<u8> {
    let message = Message {
        stamp: Stamp {
            version: WIRE_VERSION,
            agent: agent.to_owned(),
            epoch,
            sequence,
        },
        model: model.to_owned(),
        file: Cow::Borrowed(file),
    };
    message.encode().unwrap()
}

fn push(store: &MemoryStore, sequence: u64, model: &str, token: &str) -> Result<PushReply, u16> {
    let bytes = message("a", 1, sequence, model, &file(token));
    accept_tokenizer(store, &bytes, 500).map_err(|refusal| refusal.status.code())
}

/// Model and first token of every tokenizer held.
fn held(store: &MemoryStore) -> Vec<(String, String)> {
    let entries = read(store.get(KEY_INDEX).as_ref());
    let token = |entry: &Entry| {
        let stored = store.get(&key(entry.slot));
        let bytes = file_of(stored.as_ref(), entry.digest).unwrap();
        assert_eq!(u64::try_from(bytes.len()).unwrap(), entry.bytes);
        TokenizerFile::parse(bytes).unwrap().model.vocab[0]
            .0
            .clone()
    };
    let mut held: Vec<_> = entries
        .iter()
        .map(|it| (it.model.clone(), token(it)))
        .collect();
    held.sort();
    held
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = |(model, token): &(&str, &str)| ((*model).to_owned(), (*token).to_owned());
    pairs.iter().map(owned).collect()
}

#[test]
fn a_push_is_held_replaced_by_newer_ones_and_not_by_older() {
    let store = MemoryStore::new();
    let reply = push(&store, 1, "m", "x").unwrap();
    assert_eq!(
        (reply.epoch, reply.sequence, reply.agent.as_str()),
        (1, 1, "a")
    );
    push(&store, 2, "n", "y").unwrap();
    assert_eq!(held(&store), pairs(&[("m", "x"), ("n", "y")]));
    assert_eq!(push(&store, 1, "m", "z"), Err(409));
    push(&store, 3, "m", "z").unwrap();
    assert_eq!(held(&store), pairs(&[("m", "z"), ("n", "y")]));
    // Another agent has to go above the epoch that the refusal tells.
    let other = accept_tokenizer(&store, &message("b", 1, 9, "m", &file("b")), 500).unwrap_err();
    assert_eq!((other.reply.epoch, other.reply.sequence), (1, 3));
    accept_tokenizer(&store, &message("b", 2, 1, "m", &file("b")), 500).unwrap();
    assert_eq!(held(&store), pairs(&[("m", "b"), ("n", "y")]));
}

#[test]
fn what_is_held_already_is_not_written_again() {
    let store = MemoryStore::new();
    push(&store, 5, "m", "x").unwrap();
    let (_, writes) = store.calls();
    // Whatever its stamp: nothing would change.
    let reply = push(&store, 2, "m", "x").unwrap();
    assert_eq!((reply.sequence, store.calls().1), (5, writes));
}

#[test]
fn what_is_no_tokenizer_is_refused_and_changes_nothing() {
    let store = MemoryStore::new();
    push(&store, 1, "m", "x").unwrap();
    let refused = |bytes: &[u8]| {
        let refusal = accept_tokenizer(&store, bytes, 500).unwrap_err();
        assert!(!refusal.reply.error.is_empty());
        refusal.status.code()
    };
    assert_eq!(refused(b""), 400);
    assert_eq!(refused(b"{}\n{}"), 400);
    assert_eq!(refused(&message("a", 1, 2, "m", b"")), 400);
    assert_eq!(refused(&message("a", 1, 2, "m", b"{}")), 400);
    assert_eq!(refused(&message("a", 1, 2, "m", &file("x")[1..])), 400);
    let unigram = br#"{"model":{"type":"Unigram","vocab":[["a",-1]]}}"#;
    assert_eq!(refused(&message("a", 1, 2, "m", unigram)), 400);
    assert_eq!(refused(&vec![b' '; MAX_MESSAGE + 1]), 413);
    let newer = String::from_utf8(message("a", 1, 2, "m", &file("x"))).unwrap();
    let newer = newer.replace("\"version\":1", "\"version\":9");
    assert_eq!(refused(newer.as_bytes()), 426);
    store.refuse(true);
    assert_eq!(refused(&message("a", 1, 2, "m", &file("y"))), 503);
    store.refuse(false);
    assert_eq!(held(&store), pairs(&[("m", "x")]));
}

#[test]
fn as_many_are_held_as_there_are_slots_and_those_of_an_earlier_agent_make_room() {
    let store = MemoryStore::new();
    for n in 0..MAX_TOKENIZERS {
        push(&store, 1, &format!("m{n}"), "x").unwrap();
    }
    assert_eq!(push(&store, 2, "more", "x"), Err(413));
    assert_eq!(store.keys().len(), MAX_TOKENIZERS + 1);
    push(&store, 2, "m0", "y").unwrap();
    // The next life of the agent: the oldest leaves, not the one that was renewed.
    accept_tokenizer(&store, &message("a", 2, 1, "more", &file("z")), 500).unwrap();
    let models: Vec<_> = held(&store).into_iter().map(|(model, _)| model).collect();
    assert_eq!(models.len(), MAX_TOKENIZERS);
    assert!(models.contains(&"m0".to_owned()) && models.contains(&"more".to_owned()));
    assert_eq!(store.keys().len(), MAX_TOKENIZERS + 1);
}

#[test]
fn two_pushes_at_once_end_with_the_newer_whole() {
    // Between every read and write of the slower one, the faster one gets all of its own in.
    for (slow, fast, key) in [
        (1, 2, KEY_INDEX.to_owned()),
        (2, 1, KEY_INDEX.to_owned()),
        (1, 2, key(0)),
        (2, 1, key(0)),
    ] {
        let store = MemoryStore::new();
        push(&store, 0, "m", "old").unwrap();
        let token = |sequence| ["", "older", "newer"][sequence];
        store.interpose(&key, move |store| {
            // The older one may be refused already.
            drop(push(store, fast as u64, "m", token(fast)));
        });
        drop(push(&store, slow as u64, "m", token(slow)));
        assert_eq!(
            held(&store),
            pairs(&[("m", "newer")]),
            "{slow} {fast} {key}"
        );
    }
}

#[test]
fn an_unreadable_index_is_an_empty_one() {
    let store = MemoryStore::new();
    for bytes in [&[][..], &[9, 0], &[FORMAT, 200, 200]] {
        store.put(KEY_INDEX, bytes);
        assert!(read(store.get(KEY_INDEX).as_ref()).is_empty());
        push(&store, 1, "m", "x").unwrap();
        assert_eq!(held(&store), pairs(&[("m", "x")]));
    }
}
