package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/zourzouvillys/laredo"
	"github.com/zourzouvillys/laredo/snapshotter"
	"github.com/zourzouvillys/laredo/snapshotter/dest/local"
)

// Between two diffs. The changes of a step are sent right after a diff, and must all be there before the
// next one.
const diffInterval = 250 * time.Millisecond

// step is what one artifact holds: a base where it has rows, else a diff. A change without images is a
// TRUNCATE.
type step struct {
	Position string
	Rows     []laredo.Row
	Changes  []struct{ Old, New laredo.Row }
}

// table is the subscription that the writer follows.
type table struct {
	mu       sync.Mutex
	rows     []laredo.Row
	position string
	changed  func(old, new laredo.Row)
}

func (t *table) Start(context.Context) error           { return nil }
func (t *table) Stop()                                 {}
func (t *table) AwaitReady(time.Duration) bool         { return true }
func (t *table) OnChange(fn func(old, new laredo.Row)) { t.changed = fn }

func (t *table) Snapshot() ([]laredo.Row, string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.rows, t.position
}

func (t *table) CurrentPosition() string {
	_, position := t.Snapshot()
	return position
}

func (t *table) Count() int {
	rows, _ := t.Snapshot()
	return len(rows)
}

func (t *table) set(s step) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rows, t.position = s.Rows, s.Position
}

// write runs Laredo's writer through the steps, of which the first is a base.
func write(folder, name string, keyFields []string) error {
	decoder := json.NewDecoder(os.Stdin)
	decoder.UseNumber()
	var steps []step
	if err := decoder.Decode(&steps); err != nil {
		return err
	}
	for _, s := range steps {
		for _, row := range s.Rows {
			typed(row)
		}
		for _, c := range s.Changes {
			typed(c.Old)
			typed(c.New)
		}
	}
	both := []snapshotter.Format{formats["jsonl"], formats["protobuf"]}
	source := &table{}
	source.set(steps[0])
	writer, err := snapshotter.New(source, snapshotter.Config{
		Table: name, KeyFields: keyFields, SnapshotFormats: both, DiffFormats: both,
		Destinations: []snapshotter.Destination{local.New(folder)},
		Policy:       snapshotter.Policy{DiffInterval: diffInterval},
		Logger:       slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- writer.Run(ctx) }()
	for i, s := range steps {
		if i > 0 {
			source.set(s)
		}
		if i > 0 && s.Changes == nil {
			if err := writer.Snapshot(ctx); err != nil {
				return err
			}
		}
		for _, c := range s.Changes {
			source.changed(c.Old, c.New)
		}
		for at := writer.Status(); at.Epoch == 0 || at.HeadPosition != s.Position; at = writer.Status() {
			select {
			case err := <-done:
				return err
			case <-time.After(time.Millisecond):
			}
		}
	}
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// typed makes integers of numbers, as rows of PostgreSQL have them.
func typed(row laredo.Row) {
	for name, value := range row {
		number, found := value.(json.Number)
		if !found {
			continue
		}
		if whole, err := number.Int64(); err == nil {
			row[name] = whole
		} else {
			row[name], _ = number.Float64()
		}
	}
}
