//! Runs pd-core's own suites on wasm32-unknown-unknown under Node: the attribute `test` of this
//! crate, imported by `#[macro_use]`, takes the place of the standard one, so that the same test
//! functions serve natively and in wasm. `scripts/test-core-wasm.sh` runs them.

// wasm-bindgen-test-runner finds tests by the exports this attribute makes.
#[cfg(all(target_arch = "wasm32", target_os = "unknown"))]
pub use wasm_bindgen_test::wasm_bindgen_test as test;
