//! Shared data and shared queues, with the rules of proxy-wasm-cpp-host (`shared_data.cc`,
//! `shared_queue.cc`): one space per `vm_id`, surviving every VM.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Status, VmKey};

/// Key-value data by `vm_id`; every write takes the next CAS number.
#[derive(Default)]
pub struct SharedData {
    spaces: BTreeMap<String, BTreeMap<String, (Vec<u8>, u32)>>,
    last_cas: u32,
    races: u32,
    intruder: Option<(String, Vec<u8>)>,
    /// After each read the thread gives way, so that others may write before its guest does.
    pub crowded: bool,
    /// Reads, writes and refused writes so far, for tests of what an operation costs.
    pub counts: Counts,
}

/// The store of a process: gateways that are given the same one are workers of one process, each
/// on a thread of its own.
#[derive(Clone, Default)]
pub struct SharedStore(Arc<Mutex<SharedData>>);

/// How often guests used the store.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// `get_shared_data` calls.
    pub gets: u64,
    /// Writes that took effect.
    pub sets: u64,
    /// Writes refused for their CAS.
    pub mismatches: u64,
}

struct Queue {
    owner: (VmKey, u32),
    items: VecDeque<Vec<u8>>,
}

/// Queues by token; a name belongs to the root that registered it last.
#[derive(Default)]
pub(crate) struct SharedQueues {
    tokens: BTreeMap<(String, String), u32>,
    queues: BTreeMap<u32, Queue>,
    /// One entry per enqueue, not yet delivered: (VM, root context, token).
    pub(crate) notices: VecDeque<(VmKey, u32, u32)>,
}

// === impl SharedStore ===

impl SharedStore {
    /// The data, for as long as the guard lives.
    pub fn lock(&self) -> MutexGuard<'_, SharedData> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl SharedData ===

impl SharedData {
    /// Value and CAS of a key.
    ///
    /// # Errors
    /// `NotFound` when nobody wrote it.
    pub fn get(&self, vm_id: &str, key: &str) -> Result<(Vec<u8>, u32), Status> {
        self.spaces
            .get(vm_id)
            .and_then(|s| s.get(key))
            .cloned()
            .ok_or(Status::NotFound)
    }

    /// Writes a key: `cas == 0` overwrites; another must equal the stored one; on a missing key
    /// it is ignored.
    ///
    /// # Errors
    /// `CasMismatch` when the key was written since.
    pub fn set(&mut self, vm_id: &str, key: &str, value: &[u8], cas: u32) -> Result<(), Status> {
        let space = self.spaces.entry(vm_id.to_owned()).or_default();
        if let Some((_, stored)) = space.get(key)
            && cas != 0
            && cas != *stored
        {
            self.counts.mismatches += 1;
            return Err(Status::CasMismatch);
        }
        self.last_cas += 1;
        space.insert(key.to_owned(), (value.to_vec(), self.last_cas));
        self.counts.sets += 1;
        Ok(())
    }

    /// Keys of a space, sorted.
    pub fn keys(&self, vm_id: &str) -> Vec<String> {
        self.spaces
            .get(vm_id)
            .map(|s| s.keys().cloned().collect())
            .unwrap_or_default()
    }

    /// Lets the next `n` conditional writes to existing keys lose a race: the key is rewritten
    /// unchanged, under a new CAS, just before each of them.
    pub fn race_next_writes(&mut self, n: u32) {
        self.races = n;
    }

    /// Just before a guest's next write to `key`, another writer stores `value` there.
    pub fn intrude_before_next_write(&mut self, key: &str, value: &[u8]) {
        self.intruder = Some((key.to_owned(), value.to_vec()));
    }

    /// A guest's write: like [`SharedData::set`], after the interference asked for.
    pub(crate) fn set_raced(
        &mut self,
        vm_id: &str,
        key: &str,
        value: &[u8],
        cas: u32,
    ) -> Result<(), Status> {
        if let Some((_, other)) = self.intruder.take_if(|(k, _)| k == key) {
            self.set(vm_id, key, &other, 0)?;
        }
        if self.races > 0
            && cas != 0
            && let Ok((stored, _)) = self.get(vm_id, key)
        {
            self.races -= 1;
            self.set(vm_id, key, &stored, 0)?;
        }
        self.set(vm_id, key, value, cas)
    }
}

// === impl SharedQueues ===

impl SharedQueues {
    /// Registers or takes over a queue; its items stay.
    pub(crate) fn register(&mut self, vm_id: &str, name: &str, vm: VmKey, root: u32) -> u32 {
        let next = self.tokens.len() as u32 + 1;
        let token = *self
            .tokens
            .entry((vm_id.to_owned(), name.to_owned()))
            .or_insert(next);
        self.queues
            .entry(token)
            .or_insert_with(|| Queue {
                owner: (vm, root),
                items: VecDeque::new(),
            })
            .owner = (vm, root);
        token
    }

    pub(crate) fn resolve(&self, vm_id: &str, name: &str) -> Result<u32, Status> {
        let key = (vm_id.to_owned(), name.to_owned());
        self.tokens.get(&key).copied().ok_or(Status::NotFound)
    }

    pub(crate) fn enqueue(&mut self, token: u32, value: Vec<u8>) -> Result<(), Status> {
        let queue = self.queues.get_mut(&token).ok_or(Status::NotFound)?;
        queue.items.push_back(value);
        let (vm, root) = queue.owner;
        self.notices.push_back((vm, root, token));
        Ok(())
    }

    pub(crate) fn dequeue(&mut self, token: u32) -> Result<Vec<u8>, Status> {
        let queue = self.queues.get_mut(&token).ok_or(Status::NotFound)?;
        queue.items.pop_front().ok_or(Status::Empty)
    }

    /// Items waiting in a queue.
    pub(crate) fn waiting(&self, vm_id: &str, name: &str) -> Option<usize> {
        let token = self.resolve(vm_id, name).ok()?;
        self.queues.get(&token).map(|q| q.items.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cas_follows_the_reference_host() {
        let mut data = SharedData::default();
        assert_eq!(data.get("vm", "k"), Err(Status::NotFound));
        // Ignored on a missing key.
        assert_eq!(data.set("vm", "k", b"1", 77), Ok(()));
        let (_, first) = data.get("vm", "k").unwrap();
        assert_eq!(data.set("vm", "k", b"2", first), Ok(()));
        assert_eq!(data.set("vm", "k", b"3", first), Err(Status::CasMismatch));
        let (value, second) = data.get("vm", "k").unwrap();
        assert_eq!(value, b"2");
        assert!(second > first);
        // Zero overwrites blindly.
        assert_eq!(data.set("vm", "k", b"4", 0), Ok(()));
        assert_eq!(data.get("other", "k"), Err(Status::NotFound));
    }

    #[test]
    fn a_raced_write_mismatches_and_leaves_the_value() {
        let mut data = SharedData::default();
        data.set("vm", "k", b"1", 0).unwrap();
        let (_, cas) = data.get("vm", "k").unwrap();
        data.race_next_writes(1);
        assert_eq!(
            data.set_raced("vm", "k", b"2", cas),
            Err(Status::CasMismatch)
        );
        let (value, cas) = data.get("vm", "k").unwrap();
        assert_eq!(value, b"1");
        assert_eq!(data.set_raced("vm", "k", b"2", cas), Ok(()));
        data.intrude_before_next_write("new", b"theirs");
        assert_eq!(
            data.set_raced("vm", "new", b"ours", 9),
            Err(Status::CasMismatch)
        );
        assert_eq!(data.get("vm", "new").unwrap().0, b"theirs");
    }

    #[test]
    fn registering_a_name_again_takes_it_over() {
        let mut queues = SharedQueues::default();
        let token = queues.register("vm", "q", 0, 1);
        queues.enqueue(token, b"a".to_vec()).unwrap();
        assert_eq!(queues.register("vm", "q", 1, 2), token);
        queues.enqueue(token, b"b".to_vec()).unwrap();
        assert_eq!(queues.notices, [(0, 1, token), (1, 2, token)]);
        assert_eq!(queues.dequeue(token), Ok(b"a".to_vec()));
        assert_eq!(queues.dequeue(token), Ok(b"b".to_vec()));
        assert_eq!(queues.dequeue(token), Err(Status::Empty));
        assert_eq!(queues.dequeue(9), Err(Status::NotFound));
        assert_eq!(queues.resolve("vm", "nobody"), Err(Status::NotFound));
    }
}
