// Reads an archive with Laredo's own reader, and writes one with its own writer.
//
// usage: prove read FOLDER FORMAT KEY_FIELDS POSITION
//
//	prove write FOLDER TABLE KEY_FIELDS < steps as JSON
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strconv"
	"strings"

	"github.com/zourzouvillys/laredo"
	"github.com/zourzouvillys/laredo/snapshotter"
	"github.com/zourzouvillys/laredo/snapshotter/dest/local"
	"github.com/zourzouvillys/laredo/snapshotter/format/jsonl"
	"github.com/zourzouvillys/laredo/snapshotter/format/protobuf"
)

var formats = map[string]snapshotter.Format{"jsonl": jsonl.New(), "protobuf": protobuf.New()}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 5 && args[0] == "read":
		return read(args[1], args[2], strings.Split(args[3], ","), args[4])
	case len(args) == 4 && args[0] == "write":
		return write(args[1], args[2], strings.Split(args[3], ","))
	}
	return errors.New("usage: prove read FOLDER FORMAT KEY_FIELDS POSITION | prove write FOLDER TABLE KEY_FIELDS")
}

// read prints the table at a position. Every way to it that the reader offers must give the same rows.
func read(folder, format string, keyFields []string, position string) error {
	ctx := context.Background()
	reader, err := snapshotter.NewReader(local.New(folder), "", formats[format])
	if err != nil {
		return err
	}
	m, err := reader.LoadManifest(ctx)
	if err != nil {
		return err
	}
	rows, reached, err := replay(ctx, reader, upTo(*m, position), keyFields)
	if err != nil {
		return err
	}
	ways := []string{"Plan"}
	if found, at, err := reconstruct(ctx, reader, position, keyFields); err != nil {
		return err
	} else if found != nil {
		if at != reached || !reflect.DeepEqual(keyed(found, keyFields), keyed(rows, keyFields)) {
			return fmt.Errorf("ReconstructAsOf: %v at %s; Plan: %v at %s", found, at, rows, reached)
		}
		ways = append(ways, "ReconstructAsOf")
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{
		"table": m.Table, "head": m.HeadPosition, "position": reached, "rows": rows, "ways": ways,
	})
}

// upTo is the manifest as it was when the position was its head.
func upTo(m snapshotter.Manifest, position string) *snapshotter.Manifest {
	var artifacts []snapshotter.Artifact
	for _, a := range m.Artifacts {
		if compare(a.ToPosition, position) <= 0 {
			artifacts = append(artifacts, a)
			m.HeadPosition = a.ToPosition
		}
	}
	m.Artifacts = artifacts
	return &m
}

// replay follows the plan from the newest base, and checks that a follower that was at the oldest
// position of the base's epoch is led to the same rows.
func replay(
	ctx context.Context, reader *snapshotter.Reader, m *snapshotter.Manifest, keyFields []string,
) ([]laredo.Row, string, error) {
	plan, err := reader.Plan(m, "nowhere", compare)
	if err != nil || plan == nil || plan.Snapshot == nil {
		return nil, "", fmt.Errorf("no base: %v, %w", plan, err)
	}
	table, err := base(ctx, reader, *plan.Snapshot, keyFields)
	if err != nil {
		return nil, "", err
	}
	if err := apply(ctx, reader, table, plan.Diffs, keyFields); err != nil {
		return nil, "", err
	}
	for _, a := range m.Artifacts {
		if a.Kind != snapshotter.KindSnapshot {
			continue
		}
		following, err := reader.Plan(m, a.ToPosition, compare)
		if err != nil || following == nil {
			return nil, "", fmt.Errorf("no plan from %s: %w", a.ToPosition, err)
		}
		if following.Snapshot != nil {
			continue // a gap: followers load the new base
		}
		followed, err := base(ctx, reader, a, keyFields)
		if err != nil {
			return nil, "", err
		}
		if err := apply(ctx, reader, followed, following.Diffs, keyFields); err != nil {
			return nil, "", err
		}
		if !reflect.DeepEqual(followed, table) {
			return nil, "", fmt.Errorf("a follower from %s has %v, not %v", a.ToPosition, followed, table)
		}
	}
	rows := make([]laredo.Row, 0, len(table))
	for _, row := range table {
		rows = append(rows, row)
	}
	return rows, plan.HeadPosition, nil
}

func base(
	ctx context.Context, reader *snapshotter.Reader, a snapshotter.Artifact, keyFields []string,
) (map[string]laredo.Row, error) {
	rows, err := reader.ReadSnapshot(ctx, a)
	if err != nil {
		return nil, err
	}
	table := keyed(rows, keyFields)
	if len(table) != len(rows) || int64(len(rows)) != a.RowCount {
		return nil, fmt.Errorf("%d keys, %d rows, row_count %d", len(table), len(rows), a.RowCount)
	}
	return table, nil
}

func apply(
	ctx context.Context, reader *snapshotter.Reader, table map[string]laredo.Row,
	diffs []snapshotter.Artifact, keyFields []string,
) error {
	for _, diff := range diffs {
		changes, err := reader.ReadDiff(ctx, diff)
		if err != nil {
			return err
		}
		if int64(len(changes)) != diff.ChangeCount {
			return fmt.Errorf("%d changes, change_count %d", len(changes), diff.ChangeCount)
		}
		for _, c := range changes {
			image := c.New
			switch c.Action {
			case laredo.ActionTruncate:
				clear(table)
				continue
			case laredo.ActionDelete:
				image = c.Old
				delete(table, c.Key)
			default:
				table[c.Key] = c.New
			}
			if made := snapshotter.RowKey(image, keyFields); made != c.Key {
				return fmt.Errorf("key %q of a change is %q by its row", c.Key, made)
			}
		}
	}
	return nil
}

func keyed(rows []laredo.Row, keyFields []string) map[string]laredo.Row {
	table := map[string]laredo.Row{}
	for _, row := range rows {
		table[snapshotter.RowKey(row, keyFields)] = row
	}
	return table
}

// reconstruct calls Reader.ReconstructAsOf; without rows where this version of the module lacks it.
func reconstruct(
	ctx context.Context, reader *snapshotter.Reader, position string, keyFields []string,
) ([]laredo.Row, string, error) {
	method := reflect.ValueOf(reader).MethodByName("ReconstructAsOf")
	if !method.IsValid() {
		return nil, "", nil
	}
	args := []any{ctx, position, keyFields, compare}
	values := make([]reflect.Value, len(args))
	for i, arg := range args {
		values[i] = reflect.ValueOf(arg)
	}
	results := method.Call(values)
	if err, failed := results[1].Interface().(error); failed {
		return nil, "", err
	}
	if results[0].IsNil() {
		return nil, "", fmt.Errorf("ReconstructAsOf does not reach %s", position)
	}
	found := results[0].Elem()
	rows := append([]laredo.Row{}, found.FieldByName("Rows").Interface().([]laredo.Row)...)
	return rows, found.FieldByName("Position").String(), nil
}

// compare orders positions as Laredo's own comparator does, which is internal to its module: as LSNs,
// with all other text before them.
func compare(a, b string) int {
	return int(min(max(lsn(a)-lsn(b), -1), 1))
}

func lsn(position string) int64 {
	high, low, _ := strings.Cut(position, "/")
	h, err1 := strconv.ParseUint(high, 16, 31)
	l, err2 := strconv.ParseUint(low, 16, 32)
	if err1 != nil || err2 != nil {
		return -1
	}
	return int64(h<<32 | l)
}
