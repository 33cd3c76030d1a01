//! `fuselane kernels`: the GPU kernels as source, and what NVIDIA's compiler makes of them. It
//! needs no GPU.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::ValueEnum;

/// Write the sources of the GPU kernels, and count their registers; no GPU is needed.
///
/// There is a kernel for every operator, dtype and class of options. The table shows their names,
/// the units of a cube (threads of a block) and its bytes of shared memory, and, for each
/// architecture of --ptx, registers of a thread, bytes that are spilled to memory, and bits of the
/// widest load.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only kernels whose name matches one of these, as in `act_forward-bf16-*`.
    #[arg(value_name = "GLOB")]
    globs: Vec<String>,
    /// The language.
    #[arg(long, value_enum, default_value_t = Emit::Cuda)]
    emit: Emit,
    /// Write a file for each kernel into this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Compile for these architectures of NVIDIA, as in `sm_80,sm_90a`, with NVRTC: the one in the
    /// folder FUSELANE_NVRTC, of the system, or of the Python package nvidia-cuda-nvrtc-cu12. With
    /// --out, the PTX is written too.
    #[arg(long, value_name = "ARCH", value_delimiter = ',', value_parser = parse_architecture)]
    ptx: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Emit {
    Cuda,
    Hip,
    Metal,
    Wgsl,
}

fn parse_architecture(name: &str) -> Result<String, String> {
    let digits = name.strip_prefix("sm_").map(|rest| rest.trim_end_matches(['a', 'f']));
    match digits {
        Some(digits) if digits.parse::<u16>().is_ok() => Ok(name.to_owned()),
        _ => Err("expected an architecture such as sm_80".to_owned()),
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    if !args.ptx.is_empty() && args.emit != Emit::Cuda {
        let text = "--ptx goes with --emit cuda only\n";
        clap::Error::raw(clap::error::ErrorKind::ArgumentConflict, text).exit();
    }
    Ok(with_sources::run(args)?)
}

#[cfg(not(feature = "gpu-sources"))]
mod with_sources {
    use super::*;

    pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
        let Args { globs: _, emit, out: _, ptx: _ } = args;
        let features = if *emit == Emit::Wgsl { "gpu-sources,wgpu" } else { "gpu-sources" };
        Err(format!(
            "this build has no GPU kernels. This one does:\n  \
             cargo run --release --bin fuselane --features {features} -- kernels ..."
        ))
    }
}

#[cfg(feature = "gpu-sources")]
mod with_sources {
    use std::io::Write as _;

    use fuselane_gpu::sources::{Language, Source, nvrtc, sources};
    use glob::Pattern;

    use super::*;
    use crate::report::file;

    pub(super) fn run(args: &Args) -> Result<ExitCode, String> {
        let sources = select(args)?;
        let architectures: Vec<&str> = args.ptx.iter().map(String::as_str).collect();
        let results = if architectures.is_empty() {
            vec![Vec::new(); sources.len()]
        } else {
            let compiler = nvrtc::Nvrtc::load().map_err(|fault| fault.to_string())?;
            compiler.compile_all(&sources, &architectures, rayon::current_num_threads())
        };
        if let Some(out) = &args.out {
            file::folder(out)?;
            for (source, results) in sources.iter().zip(&results) {
                let extension = language(args.emit)?.extension();
                file::write(&out.join(format!("{}.{extension}", source.name)), &source.text)?;
                for (architecture, kernel) in architectures.iter().zip(results) {
                    if let Ok(kernel) = kernel {
                        let name = format!("{}.{architecture}.ptx", source.name);
                        file::write(&out.join(name), &kernel.ptx)?;
                    }
                }
            }
        }
        let table = nvrtc::table(&sources, &architectures, &results);
        anstream::stdout().write_all(table.as_bytes()).map_err(|error| error.to_string())?;
        let mut code = ExitCode::SUCCESS;
        for (source, results) in sources.iter().zip(&results) {
            for fault in results.iter().filter_map(|result| result.as_ref().err()) {
                eprintln!("fuselane: {}: {fault}", source.name);
                code = ExitCode::FAILURE;
            }
        }
        Ok(code)
    }

    fn language(emit: Emit) -> Result<Language, String> {
        let name = emit.to_possible_value().map(|value| value.get_name().to_owned());
        let name = name.unwrap_or_default();
        name.parse().map_err(|_| {
            format!(
                "this build writes no {name}. This one does:\n  \
                 cargo run --release --bin fuselane --features gpu-sources,wgpu -- kernels ..."
            )
        })
    }

    fn select(args: &Args) -> Result<Vec<Source>, String> {
        let pattern =
            |text: &String| Pattern::new(text).map_err(|error| format!("glob {text:?}: {error}"));
        let patterns: Vec<Pattern> = args.globs.iter().map(pattern).collect::<Result<_, _>>()?;
        let wanted = |name: &str| {
            patterns.is_empty() || patterns.iter().any(|pattern| pattern.matches(name))
        };
        let found = sources(language(args.emit)?, &wanted).map_err(|error| error.to_string())?;
        if found.is_empty() {
            let globs = args.globs.join(" ");
            return Err(format!("no kernel matches {globs}; without a glob, all are listed"));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures() {
        for name in ["sm_80", "sm_90a", "sm_100f"] {
            assert_eq!(parse_architecture(name).unwrap(), name);
        }
        for name in ["", "80", "sm_", "sm_a", "compute_80"] {
            assert!(parse_architecture(name).is_err(), "{name}");
        }
    }
}
