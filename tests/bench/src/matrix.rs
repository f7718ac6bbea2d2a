//! Every cell of the matrix, both targets in turn, repeat after repeat.

use anyhow::{Result, ensure};

use crate::args::Matrix;
use crate::load::{Load, Session, Until};
use crate::measured::Measured;
use crate::process;
use crate::prompt::{Counter, Prompt};
use crate::report::{self, Report};
use crate::target::Target;

/// The two that are compared.
pub(crate) struct Pair {
    pub(crate) baseline: Target,
    pub(crate) contender: Target,
}

/// One kind of load.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(crate) struct Cell {
    /// Size of the client's body.
    pub(crate) body_bytes: usize,
    /// Whether answers are streamed.
    pub(crate) stream: bool,
    /// Requests in flight.
    pub(crate) concurrency: usize,
}

/// One cell's measurements; the two lists are in step.
#[derive(Debug)]
pub(crate) struct Runs {
    pub(crate) cell: Cell,
    pub(crate) baseline: Vec<Measured>,
    pub(crate) contender: Vec<Measured>,
}

/// Measures, prints the tables, writes the JSON.
///
/// # Errors
/// When a request failed, after everything is printed; at once when a target is gone.
pub(crate) fn compare(pair: Pair, matrix: &Matrix) -> Result<()> {
    let load_average = process::load_average()?;
    let counter = Counter::new();
    let mut all: Vec<Runs> = cells(matrix)
        .into_iter()
        .map(|cell| Runs {
            cell,
            baseline: Vec::new(),
            contender: Vec::new(),
        })
        .collect();
    for repeat in 0..matrix.repeats() {
        for (at, runs) in all.iter_mut().enumerate() {
            let cell = runs.cell;
            let prompt = Prompt::new(&matrix.model, cell.body_bytes, cell.stream, "pd-bench")?;
            let prompts = [prompt];
            let open = |target| {
                Session::open(Load {
                    target,
                    prompts: &prompts,
                    counter: &counter,
                    concurrency: cell.concurrency,
                })
            };
            let (mut baseline, mut contender) = (open(&pair.baseline)?, open(&pair.contender)?);
            for session in [&mut baseline, &mut contender] {
                session.slice(Until::Elapsed(matrix.warm_up()))?;
                session.forget();
            }
            // Short turns, so that what else the machine does meets both alike. Who goes first
            // changes with every turn, cell and repeat.
            let first = at + repeat as usize;
            for turn in 0..matrix.turns() {
                let slice = Until::Elapsed(matrix.slice());
                if (first + turn).is_multiple_of(2) {
                    baseline.slice(slice)?;
                    contender.slice(slice)?;
                } else {
                    contender.slice(slice)?;
                    baseline.slice(slice)?;
                }
            }
            let (baseline, contender) = (baseline.finish()?, contender.finish()?);
            report::progress(repeat, &cell, &pair, &baseline, &contender);
            let errors = baseline.errors + contender.errors;
            runs.baseline.push(baseline);
            runs.contender.push(contender);
            // A broken target would otherwise be found out only at the end.
            ensure!(errors == 0, report::reasons(runs, &pair));
        }
    }
    let report = Report::new(&pair, matrix, load_average, &all);
    print!("{}", report.markdown());
    if let Some(path) = &matrix.json {
        report.write(path)?;
    }
    Ok(())
}

fn cells(matrix: &Matrix) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &concurrency in &matrix.concurrency {
        for &body_bytes in &matrix.sizes {
            for &stream in &matrix.stream {
                cells.push(Cell {
                    body_bytes,
                    stream,
                    concurrency,
                });
            }
        }
    }
    cells
}
