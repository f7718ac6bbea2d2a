//! `count TOKENIZER [TEXT]...`: whether a `tokenizer.json` can be counted with, what of it is
//! pushed, how long it takes to build, and the tokens of the texts (files).

use pd_tokenizer::Counter;
use pd_wire::tokenizer::TokenizerFile;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("count TOKENIZER [TEXT]...")?;
    let bytes = std::fs::read(path)?;
    let file = TokenizerFile::parse(&bytes)?;
    let pushed = file.to_json()?;
    println!("{} bytes, {} of them pushed", bytes.len(), pushed.len());
    if let Some(problem) = file.impossible_merge() {
        println!("{problem}");
    }
    let begun = Instant::now();
    let counter = Counter::build(TokenizerFile::parse(&pushed)?)?;
    println!("built in {} ms", begun.elapsed().as_millis());
    for path in arguments {
        let text = std::fs::read_to_string(&path)?;
        let begun = Instant::now();
        let tokens = counter.count(&text);
        let micros = begun.elapsed().as_micros();
        println!(
            "{path}: {} bytes, {tokens:?} tokens, {micros} us",
            text.len()
        );
    }
    Ok(())
}
