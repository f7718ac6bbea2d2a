//! What the control endpoint tells about charges and VMs.

use super::Ledger;
use crate::port::SharedStore;
use pd_wire::control::VmStatus;

impl Ledger {
    /// The live VMs of this format, as of now.
    pub fn vms<S: SharedStore + ?Sized>(&self, store: &S) -> Vec<VmStatus> {
        let stored = store.get(&super::slots::key(crate::FORMAT));
        let table = stored.and_then(|stored| super::slots::Table::parse(&stored.bytes).ok());
        let table = table.as_ref().unwrap_or(self.peers.table());
        table
            .owners()
            .map(|(vm, slot)| VmStatus {
                slot: u32::from(vm.slot),
                generation: vm.generation,
                beat: slot.beat,
                live_flows: slot.vitals.live_flows,
                memory_pages: slot.vitals.memory_pages,
            })
            .collect()
    }
}
