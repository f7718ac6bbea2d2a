//! Shared data as the core's [`SharedStore`].
//!
//! The host ignores the version on a key that does not exist and overwrites blindly at version
//! zero. So a *create* passes a version that no key can have: if another VM created the key
//! first, the host reports a mismatch and the caller reads again.

use pd_core::port::{Cas, SharedStore, StoreError, Stored};
use proxy_wasm::hostcalls;

/// Version no stored value reaches.
const SENTINEL: u32 = u32::MAX;

/// Envoy's shared data.
#[derive(Clone, Copy, Debug, Default)]
pub struct SharedData;

impl SharedStore for SharedData {
    fn get(&self, key: &str) -> Option<Stored> {
        match hostcalls::get_shared_data(key) {
            Ok((Some(bytes), Some(cas))) => Some(Stored {
                bytes,
                cas: Cas(cas),
            }),
            _ => None,
        }
    }

    fn create(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.swap(key, bytes, Cas(SENTINEL))
    }

    fn swap(&self, key: &str, bytes: &[u8], cas: Cas) -> Result<(), StoreError> {
        hostcalls::set_shared_data(key, Some(bytes), Some(cas.0)).map_err(|_| StoreError::Raced)
    }
}
