//! Which merges SlateDB may run at once.

use slatedb::compactor::{
    CompactionScheduler, CompactionSchedulerSupplier, CompactionSpec, CompactionStatus,
    CompactorStateView, SizeTieredCompactionSchedulerSupplier, SourceId,
};
use slatedb::config::CompactorOptions;
use slatedb::{Error, VersionedCompactions};

type Scheduler = Box<dyn CompactionScheduler + Send + Sync>;

/// SlateDB's own scheduler, which also refuses a merge that shares a table or a run with another
/// merge (upstream defect 26). Without this, SlateDB panics when it starts two that write one run,
/// and again each time it is opened; and it loses rows if one writes a run that another has read.
pub struct DisjointMerges;

impl CompactionSchedulerSupplier for DisjointMerges {
    fn compaction_scheduler(&self, options: &CompactorOptions) -> Scheduler {
        Box::new(Checked(SizeTieredCompactionSchedulerSupplier.compaction_scheduler(options)))
    }
}

struct Checked(Scheduler);

impl CompactionScheduler for Checked {
    fn propose(&self, state: &CompactorStateView) -> Vec<CompactionSpec> {
        self.0.propose(state)
    }

    fn validate(&self, state: &CompactorStateView, spec: &CompactionSpec) -> Result<(), Error> {
        let active = [CompactionStatus::Scheduled, CompactionStatus::Running];
        let merges = state.compactions().map(VersionedCompactions::recent_compactions);
        let mut others = merges.into_iter().flatten().filter(|it| active.contains(&it.status()));
        let shares = |source: &SourceId| spec.sources().contains(source);
        match others.any(|it| it.spec().sources().iter().any(shares)) {
            true => Err(Error::invalid("another merge reads the same tables".into())),
            false => self.0.validate(state, spec),
        }
    }
}
