//! The failure matrix against scripted engines on a driven clock: every cell a model of its own,
//! all of them in flight at once.

mod engines;
mod remains;
mod verdict;

use crate::stand::{config, ledgers_at, pod, push, status_at};
use engines::Journal;
use pd_failure_matrix::{
    Cell, Engine, LEAVES_AFTER_MS, Leg, Moment, Report, Role, RunsOn, SOON_MS, annotation, cells,
    plugin,
};
use pd_wasm_tests::{Exchange, Flight, Gateway};
use pd_wire::profile::ModelConfig;
use pd_wire::topology::MAX_MODELS;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use verdict::Run;

/// When the moment of every client that leaves has come, in ms.
const MOMENT_MS: u64 = 60;
/// When every cell has ended, in ms.
const ENDED_MS: u64 = 7000;
/// Time between two looks at the ledgers, in ms.
const LOOK_MS: u64 = 500;

/// A cell whose request is under way.
struct Live {
    cell: Rc<Cell>,
    flight: Flight,
    journal: Rc<RefCell<Journal>>,
    sent_at: u64,
}

#[test]
fn every_cell_holds() {
    let table: Vec<Cell> = cells()
        .into_iter()
        .filter(|cell| cell.runs_on != RunsOn::Envoy)
        .collect();
    let mut report = Report::of(&table);
    for generation_first in [false, true] {
        let cells = table
            .iter()
            .filter(|cell| (cell.engine == Engine::TrtGenerationFirst) == generation_first);
        let cells: Vec<Rc<Cell>> = cells.cloned().map(Rc::new).collect();
        for cells in cells.chunks(MAX_MODELS) {
            run(cells, generation_first, &mut report);
        }
    }
    report.conclude().unwrap();
}

/// Runs cells on one gateway, all at once.
fn run(cells: &[Rc<Cell>], generation_first: bool, report: &mut Report) {
    let mut gateway = Gateway::new(config(1, &plugin(generation_first).to_string()));
    let models: Vec<Value> = cells.iter().enumerate().map(model).collect();
    let topology = json!({
        "stamp": {"version": 1, "agent": "agent-0", "epoch": 1, "sequence": 1},
        "models": models,
    });
    push(&mut gateway, &topology).expect(200);
    let live: Vec<Live> = cells
        .iter()
        .enumerate()
        .map(|(number, cell)| send(&mut gateway, number, cell))
        .collect();
    gateway.advance(MOMENT_MS + LEAVES_AFTER_MS);
    for live in live.iter().filter(|live| live.cell.leg == Leg::Client) {
        gateway.disconnect(live.flight);
    }
    let charged_until = watch_ledgers(&mut gateway);
    let calls = gateway.calls();
    for live in &live {
        let run = Run {
            cell: &live.cell,
            outcome: gateway.outcome(live.flight),
            journal: &live.journal.borrow(),
            calls: &calls,
            charged_until: charged_until.get(&live.cell.model()).copied(),
            meters: &gateway.meters(),
            sent_at: live.sent_at,
        };
        report.note(&live.cell.id(), run.line());
    }
    // Of a request whose body never came the model is not known.
    let uploads = cells.iter().filter(|cell| cell.moment == Moment::Uploading);
    let gone = "gateway_request_model_fail_total{model=,status=client_gone,status_code=499}";
    assert_eq!(gateway.meters().counter(gone), uploads.count() as u64);
    assert_eq!(status_at(&mut gateway, 0).live_flows, 0);
    assert_eq!(gateway.live_streams(0), 0);
}

/// Lets every cell end, and time go by for what is left of it. Tells when a model was last seen with
/// a charge, a second too late at most.
fn watch_ledgers(gateway: &mut Gateway) -> BTreeMap<String, u64> {
    let mut charged_until = BTreeMap::new();
    for _ in 0..(ENDED_MS + SOON_MS) / LOOK_MS {
        gateway.advance(LOOK_MS);
        let models = ledgers_at(gateway, 0).models.into_iter();
        charged_until.extend(models.map(|ledger| (ledger.model, gateway.now_ms())));
    }
    charged_until
}

/// The addresses of a cell's pods.
fn addresses(number: usize, cell: &Cell) -> Vec<String> {
    let (high, low) = (number / 256, number % 256);
    let pods = cell.layout.pods().iter().enumerate();
    pods.map(|(pod, _)| format!("10.{high}.{low}.{}:8000", pod + 1))
        .collect()
}

/// A cell's model as the agent tells it.
fn model((number, cell): (usize, &Rc<Cell>)) -> Value {
    let (config, warnings) = ModelConfig::parse(&annotation(cell.fallback).to_string());
    assert_eq!(warnings, Vec::<String>::new());
    let specs = cell.layout.pods().iter().zip(addresses(number, cell));
    let pods: Vec<Value> = specs
        .map(|(spec, address)| {
            let role = match spec.role {
                Role::Prefill => "prefill",
                Role::Decode => "decode",
            };
            let mut pod = pod(spec.name, role, Some(spec.roleset), &address);
            pod["namespace"] = json!(format!("cell-{number}"));
            pod["uid"] = json!(format!("uid-{number}-{}", spec.name));
            pod["engine"] = json!(cell.engine.label());
            pod["kvConnector"] = json!(cell.engine.connector());
            pod["config"] = json!(0);
            pod
        })
        .collect();
    json!({"name": cell.model(), "configs": [config], "pods": pods})
}

fn send(gateway: &mut Gateway, number: usize, cell: &Rc<Cell>) -> Live {
    let journal = engines::start(gateway, cell, &addresses(number, cell));
    let body = cell.body();
    let exchange =
        Exchange::post(cell.path(), body.clone()).header("content-type", "application/json");
    let sent_at = gateway.now_ms();
    let flight = if cell.moment == Moment::Uploading {
        let flight = gateway.begin(exchange);
        gateway.body(flight, &body.as_bytes()[..10], false);
        flight
    } else {
        gateway.send(exchange)
    };
    Live {
        cell: Rc::clone(cell),
        flight,
        journal,
        sent_at,
    }
}
