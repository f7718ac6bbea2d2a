//! The failure matrix on a real Envoy: every cell a model with engines of its own, side by side.
//!
//! `PD_MATRIX=TEXT` runs only the cells whose id contains the text.

mod books;
mod client;
mod setting;
mod verdict;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use pd_e2e::{Stand, until};
use pd_failure_matrix::{
    Cell, Fault, LEASE_MS, Left, Leg, Line, Moment, Report, RunsOn, SOON_MS, cells, plugin,
};
use tokio::sync::{Mutex, Semaphore};

use books::Books;
use setting::Cast;

/// Requests at the same time: what two cores carry without being late themselves.
const AT_ONCE: usize = 24;
/// Counters are on Envoy's page after a tick at the latest, and the machine may be busy.
const COUNTED: Duration = Duration::from_secs(2);

/// The cells of one gateway.
struct Stage {
    cells: Vec<Cell>,
    stand: Stand,
    books: Books,
    room: Semaphore,
    /// Requests whose model is not known yet when they end are counted together.
    unnamed: Mutex<()>,
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failure_meets_a_real_envoy() {
    let wanted = std::env::var("PD_MATRIX").unwrap_or_default();
    let mut all = cells();
    all.retain(|cell| cell.runs_on != RunsOn::Host && cell.id().contains(&wanted));
    assert!(!all.is_empty(), "no cell is called {wanted:?}");
    let mut report = Report::of(&all);
    // TensorRT-LLM's schedule is a setting of the gateway, and a gateway has 200 models.
    let (together, sequential): (Vec<Cell>, Vec<Cell>) =
        all.into_iter().partition(|cell| cell.engine.is_together());
    for (cells, generation_first) in [(sequential, false), (together, true)] {
        if cells.is_empty() {
            continue;
        }
        for (id, line) in run(cells, generation_first).await {
            report.note(&id, line);
        }
    }
    report.conclude().unwrap();
}

/// Runs the cells of one gateway.
async fn run(mut cells: Vec<Cell>, generation_first: bool) -> Vec<(String, Line)> {
    // Those that wait for a lease first: the others run meanwhile.
    cells.sort_by_key(|cell| cell.expect.left == Left::Soon);
    let pods = (0..)
        .zip(&cells)
        .flat_map(|(n, cell)| setting::pods(n, cell));
    let stand = Stand::builder("matrix")
        .pods(pods)
        .plugin(&plugin(generation_first))
        .agent_arguments(["--refresh-interval-ms".to_owned(), "2000".to_owned()])
        .alone()
        .start()
        .await;
    let stage = Arc::new(Stage {
        cells,
        stand,
        books: Books::new(),
        room: Semaphore::new(AT_ONCE),
        unnamed: Mutex::new(()),
    });
    let started = Instant::now();
    let tasks: Vec<_> = (0..stage.cells.len())
        .map(|number| {
            let stage = Arc::clone(&stage);
            tokio::spawn(async move { stage.cell(number).await })
        })
        .collect();
    let mut lines = Vec::new();
    for (task, cell) in tasks.into_iter().zip(&stage.cells) {
        match task.await {
            Ok(line) => lines.push((cell.id(), line)),
            // It is reported as not run.
            Err(error) => eprintln!("{}: {error}", cell.id()),
        }
    }
    println!("{} cells in {:?}", stage.cells.len(), started.elapsed());
    stage
        .stand
        .envoy
        .settled(Duration::from_millis(SOON_MS))
        .await;
    stage.nothing_counted_since(&mut lines).await;
    lines
}

impl Stage {
    /// Runs one cell.
    async fn cell(&self, number: usize) -> Line {
        let cell = &self.cells[number];
        let cast = Cast {
            cell,
            number,
            stand: &self.stand,
        };
        let seat = self.room.acquire().await;
        let (unnamed, before) = if is_unnamed(cell) {
            let alone = self.unnamed.lock().await;
            (Some(alone), self.unnamed_left().await)
        } else {
            (None, 0)
        };
        cast.arm();
        let seen = cast.play().await;
        let ended = Instant::now();
        drop(seat);
        let (text, mut wrong) = verdict::judge(cell, &seen);
        if unnamed.is_some() {
            wrong.extend(self.left_unnamed(before, &cell.model()).await);
        }
        drop(unnamed);
        let left = nothing_left(&cast, ended).await.unwrap_or_else(|left| {
            wrong.push(format!("left behind: {left}"));
            left
        });
        wrong.extend(self.nothing_charged(&cell.model()).await.err());
        if !is_unnamed(cell) {
            wrong.extend(self.counted(cell).await.err().into_iter().flatten());
        }
        wrong.extend(died(&cast));
        Line {
            seen: text,
            ms: seen.ms,
            left,
            wrong,
        }
    }

    async fn unnamed_left(&self) -> u64 {
        let counted = self.books.counters(&self.stand.envoy).await;
        counted.map_or(0, |counted| counted.unnamed_left())
    }

    /// The one ending of a request whose model nobody had read.
    async fn left_unnamed(&self, before: u64, model: &str) -> Option<String> {
        let counted = until(COUNTED, || async {
            let counters = self.books.counters(&self.stand.envoy).await?;
            let ended = counters.unnamed_left() - before;
            ensure!(ended == 1, "{ended} endings without a model");
            ensure!(counters.endings(model) == 0, "an ending of its model");
            Ok(())
        });
        counted.await.err().map(|error| error.to_string())
    }

    async fn nothing_charged(&self, model: &str) -> Result<(), String> {
        let bound = Duration::from_millis(SOON_MS);
        let free = until(bound, || async {
            let charged = self.books.charged(&self.stand.envoy, model).await?;
            ensure!(charged.is_empty(), "still charged: {charged}");
            Ok(())
        });
        free.await.map_err(|error| format!("{error:#}"))
    }

    async fn counted(&self, cell: &Cell) -> Result<(), Vec<String>> {
        until(COUNTED, || async {
            let counters = self.books.counters(&self.stand.envoy).await;
            let counters = counters.map_err(|error| vec![format!("{error:#}")])?;
            let wrong = counters.wrong(&cell.model(), &cell.expect);
            if wrong.is_empty() { Ok(()) } else { Err(wrong) }
        })
        .await
    }

    /// At the very end the counters stand as they stood when each cell was over.
    async fn nothing_counted_since(&self, lines: &mut [(String, Line)]) {
        let counters = self.books.counters(&self.stand.envoy).await.unwrap();
        for cell in self.cells.iter().filter(|cell| !is_unnamed(cell)) {
            let line = lines.iter_mut().find(|(id, _)| *id == cell.id());
            if let Some((_, line)) = line.filter(|(_, line)| line.wrong.is_empty()) {
                line.wrong = counters.wrong(&cell.model(), &cell.expect);
            }
        }
    }
}

/// The request ends before its model is known.
fn is_unnamed(cell: &Cell) -> bool {
    (cell.leg, cell.moment) == (Leg::Client, Moment::Uploading)
}

/// Waits until the engines hold nothing of the request: what they held and for how long, empty
/// for nothing.
async fn nothing_left(cast: &Cast<'_>, ended: Instant) -> Result<String, String> {
    let bound = match cast.cell.expect.left {
        Left::Soon => SOON_MS,
        Left::Lease(_) => SOON_MS + LEASE_MS,
    };
    let first = held(cast);
    let emptied = until(Duration::from_millis(bound), || async {
        let held = held(cast);
        if held.is_empty() { Ok(()) } else { Err(held) }
    });
    emptied.await?;
    if first.is_empty() {
        return Ok(first);
    }
    Ok(format!(
        "{first} for {:.1} s",
        ended.elapsed().as_secs_f64()
    ))
}

/// What the cell's engines hold now.
fn held(cast: &Cast<'_>) -> String {
    let states: Vec<_> = cast.engines().map(|engine| engine.state()).collect();
    let counts = [
        (
            "kv",
            states.iter().map(|state| state.kv.kv_held).sum::<u64>(),
        ),
        (
            "rooms",
            states.iter().map(|state| state.rooms.rooms_open).sum(),
        ),
        ("running", states.iter().map(|state| state.running).sum()),
        ("waiting", states.iter().map(|state| state.waiting).sum()),
    ];
    let held = counts.iter().filter(|(_, count)| *count > 0);
    let held: Vec<String> = held
        .map(|(what, count)| format!("{what} {count}"))
        .collect();
    held.join(", ")
}

/// Engines that died of what they were sent.
fn died(cast: &Cast<'_>) -> Option<String> {
    let deaths = cast
        .engines()
        .flat_map(|engine| engine.state().death_causes);
    let causes: Vec<String> = deaths.map(|death| death.cause).collect();
    let meant = cast.cell.fault == Fault::Dies;
    (!causes.is_empty() && !meant).then(|| format!("an engine died: {causes:?}"))
}
