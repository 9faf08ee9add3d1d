//! Verbs whose flags are built only when they are used.
//!
//! clap's derived `Subcommand` builds the flags of every verb before it looks at the first word: more work than all
//! else that `vmm run` does before it opens the kernel.

/// Declares `enum Verb`: a line of help, the word and the arguments of each.
macro_rules! verbs {
    ($(#[doc = $about:literal] $name:literal $verb:ident($arguments:ty))*) => {
        #[derive(Debug)]
        enum Verb {
            $(#[doc = $about] $verb($arguments),)*
        }

        impl clap::Subcommand for Verb {
            fn augment_subcommands(command: clap::Command) -> clap::Command {
                command
                    .subcommand_required(true)
                    .arg_required_else_help(true)
                    $(.subcommand(
                        clap::Command::new($name).about($about.trim_start()).defer(|command| {
                            // The arguments' own documentation is for readers of the code.
                            <$arguments as clap::Args>::augment_args(command)
                                .about($about.trim_start())
                                .long_about(None)
                        }),
                    ))*
            }

            fn augment_subcommands_for_update(command: clap::Command) -> clap::Command {
                Self::augment_subcommands(command)
            }

            fn has_subcommand(name: &str) -> bool {
                [$($name),*].contains(&name)
            }
        }

        impl clap::FromArgMatches for Verb {
            fn from_arg_matches(matches: &clap::ArgMatches) -> Result<Self, clap::Error> {
                match matches.subcommand() {
                    $(Some(($name, matches)) => {
                        clap::FromArgMatches::from_arg_matches(matches).map(Self::$verb)
                    })*
                    _ => Err(clap::Error::new(clap::error::ErrorKind::MissingSubcommand)),
                }
            }

            fn update_from_arg_matches(
                &mut self,
                matches: &clap::ArgMatches,
            ) -> Result<(), clap::Error> {
                *self = Self::from_arg_matches(matches)?;
                Ok(())
            }
        }
    };
}
