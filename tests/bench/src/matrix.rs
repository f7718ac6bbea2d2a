//! Every cell of the matrix, both targets in turn, repeat after repeat.

use anyhow::{Result, ensure};

use crate::args::Matrix;
use crate::load::{Load, Until};
use crate::measured::Measured;
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
            let measure = |target| {
                let load = Load {
                    target,
                    prompts: &prompts,
                    counter: &counter,
                    concurrency: cell.concurrency,
                    until: Until::Window {
                        warm_up: matrix.warm_up(),
                        window: matrix.window(),
                    },
                };
                load.run()
            };
            // Who goes first changes from cell to cell, and in each cell from repeat to repeat.
            let baseline_first = (at + repeat as usize).is_multiple_of(2);
            let early = baseline_first
                .then(|| measure(&pair.baseline))
                .transpose()?;
            let contender = measure(&pair.contender)?;
            let baseline = match early {
                Some(measured) => measured,
                None => measure(&pair.baseline)?,
            };
            report::progress(repeat, &cell, &pair, &baseline, &contender);
            let errors = baseline.errors + contender.errors;
            runs.baseline.push(baseline);
            runs.contender.push(contender);
            // A broken target would otherwise be found out only at the end.
            ensure!(errors == 0, report::reasons(runs, &pair));
        }
    }
    let report = Report::new(&pair, matrix, &all);
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
